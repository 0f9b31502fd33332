// Memory for what is read whole in every step: weights.
//
// In pages of 4 KiB a step of 500 MB walks 130,000 page table entries and the prefetcher stops at
// each page's end. The system gives pages of 2 MiB to memory that asks for them and is aligned.
// Layers are often smaller, so they share large regions.
#pragma once

#include <ATen/core/Tensor.h>

namespace pdserve {

// An uninitialised tensor in a region of huge pages, or of ordinary ones where the system has none.
// A region is given back once no tensor is left in it.
at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace pdserve
