// What every operator does around its kernel: outputs, ids, and computing now or in a replay.
#pragma once

#include "graph.h"
#include "kernels.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace pdserve {

// Every op ends here: computes now, or is recorded. `read` are the tensors whose memory the task
// reads or writes, its output excepted.
template <typename F>
void run(F task, std::initializer_list<at::Tensor> read) {
  if (auto* graphs = recording())
    graphs->add(std::move(task), sizeof(F), read);
  else
    task();
}

inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (auto* graphs = recording()) return graphs->allocate(sizes, options);
  return at::empty(sizes, options);
}

inline Ids as_ids(const at::Tensor& ids) {
  TORCH_CHECK(ids.dim() == 1 && ids.is_contiguous(), "ids must be contiguous with 1 dim, has ",
              ids.dim());
  const bool is_narrow = ids.scalar_type() == at::kInt;
  TORCH_CHECK(is_narrow || ids.scalar_type() == at::kLong, "ids must be int32 or int64, is ",
              ids.scalar_type());
  return {is_narrow ? ids.const_data_ptr<int32_t>() : nullptr,
          is_narrow ? nullptr : ids.const_data_ptr<int64_t>(), ids.numel()};
}

inline void check_ids(const Ids& ids, int64_t limit) {
  for (int64_t i = 0; i < ids.count; ++i)
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < limit, "id ", ids[i], " is not in [0, ", limit, ")");
}

}  // namespace pdserve
