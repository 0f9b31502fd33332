// What operators check of their tensors.
#pragma once

#include "kernels.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

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

// Of a quantised weight and its products.
inline QuantizedShape make_shape(int64_t out_features, int64_t in_features, int64_t group_size,
                                 int64_t num_bits, bool has_offset, bool has_half_factors,
                                 int64_t input_bits = 16) {
  TORCH_CHECK(out_features > 0 && in_features > 0, "the weight is empty: ", out_features, " x ",
              in_features);
  TORCH_CHECK(num_bits == 4 || num_bits == 8 || num_bits == 16, "num_bits is ", num_bits,
              ", must be 4, 8 or 16");
  TORCH_CHECK(num_bits != 16 || (group_size >= in_features && !has_offset),
              "a weight of 16 bits has no scales: group_size is ", group_size, " for rows of ",
              in_features);
  TORCH_CHECK(group_size > 0 && (group_size % 8 == 0 || group_size >= in_features), "group_size ",
              group_size, " is no multiple of 8 and not the whole row of ", in_features);
  TORCH_CHECK(input_bits == 16 || (input_bits == 8 && num_bits == 4), "input_bits is ", input_bits,
              ", must be 16, or 8 with weights of 4 bits, not of ", num_bits);
  return {out_features,
          in_features,
          std::min(group_size, in_features),
          static_cast<int>(num_bits),
          has_offset,
          has_half_factors,
          static_cast<int>(input_bits)};
}

}  // namespace pdserve
