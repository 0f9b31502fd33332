// What operators check of their tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace pdserve {

inline void check_float(const at::Tensor& t, const char* name, int64_t dim) {
  TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == at::kFloat, name,
              " must be float32 on the CPU, is ", t.scalar_type(), " on ", t.device());
  TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dims, has ", t.dim());
  TORCH_CHECK(t.numel() == 0 || t.stride(-1) == 1, name, " must be contiguous in its last dim");
}

inline void check_contiguous(const at::Tensor& t, const char* name, int64_t dim) {
  check_float(t, name, dim);
  TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

inline void check_int(const at::Tensor& t, const char* name, int64_t dim) {
  TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == at::kInt, name,
              " must be int32 on the CPU, is ", t.scalar_type(), " on ", t.device());
  TORCH_CHECK(t.dim() == dim && t.is_contiguous(), name, " must be contiguous with ", dim, " dims");
}

inline void check_size(int64_t size, int64_t wanted, const char* what) {
  TORCH_CHECK(size == wanted, what, " is ", size, ", must be ", wanted);
}

}  // namespace pdserve
