// The operators on quantised weights: checks their tensors and calls the kernels.
#include "checks.h"
#include "huge_pages.h"
#include "kernels.h"
#include "recorded.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace {

using at::Tensor;

int64_t num_panels(const pdserve::QuantizedShape& shape) {
  return (shape.out_features + pdserve::panel_cols() - 1) / pdserve::panel_cols();
}

void check(const Tensor& t, const char* name, at::ScalarType type, at::IntArrayRef sizes) {
  TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == type && t.is_contiguous(), name,
              " must be contiguous ", type, " on the CPU, is ", t.scalar_type(), " on ",
              t.device());
  TORCH_CHECK(t.sizes() == sizes, name, " has shape ", t.sizes(), ", must have ", sizes);
}

void check_packed(const Tensor& packed, const pdserve::QuantizedShape& shape) {
  check(packed, "packed", at::kByte, {num_panels(shape), pdserve::quantized_panel_bytes(shape)});
}

// Room for packed panels.
Tensor empty_panels(int64_t num_panels, int64_t panel_bytes) {
  return pdserve::empty_in_huge_pages({num_panels, panel_bytes}, at::TensorOptions(at::kByte));
}

Tensor pack_quantized(const Tensor& values, const Tensor& scale,
                      const std::optional<Tensor>& offset, int64_t group_size, int64_t num_bits,
                      bool has_half_factors) {
  TORCH_CHECK(values.dim() == 2, "values must have 2 dims, has ", values.dim());
  const auto shape = pdserve::make_shape(values.size(0), values.size(1), group_size, num_bits,
                                         offset.has_value(), has_half_factors);
  const bool is_half = num_bits == 16;
  const int64_t groups =
      is_half ? 0 : (shape.in_features + shape.group_size - 1) / shape.group_size;
  check(values, "values", !is_half ? at::kChar : has_half_factors ? at::kHalf : at::kBFloat16,
        values.sizes());
  check(scale, "scale", at::kFloat, {shape.out_features, groups});
  if (offset) check(*offset, "offset", at::kFloat, {shape.out_features, groups});
  Tensor packed = at::empty({num_panels(shape), pdserve::quantized_panel_bytes(shape)},
                            values.options().dtype(at::kByte));
  pdserve::pack_quantized(shape, values.const_data_ptr(), scale.const_data_ptr<float>(),
                          offset ? offset->const_data_ptr<float>() : nullptr,
                          packed.mutable_data_ptr<uint8_t>());
  return packed;
}

Tensor quantized_rows(const Tensor& packed, const Tensor& row_ids, int64_t out_features,
                      int64_t in_features, int64_t group_size, int64_t num_bits, bool has_offset,
                      bool has_half_factors) {
  const auto shape =
      pdserve::make_shape(out_features, in_features, group_size, num_bits, has_offset,
                          has_half_factors);
  check_packed(packed, shape);
  const pdserve::Ids ids = pdserve::as_ids(row_ids);
  Tensor out = pdserve::empty({ids.count, in_features}, packed.options().dtype(at::kFloat));
  pdserve::run(
      [shape, ids, from = packed.const_data_ptr<uint8_t>(), to = out.mutable_data_ptr<float>()] {
        pdserve::check_ids(ids, shape.out_features);
        pdserve::quantized_rows(shape, from, ids, to);
      },
      {packed, row_ids});
  return out;
}

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                        int64_t out_features, int64_t in_features, int64_t group_size,
                        int64_t num_bits, bool has_offset, bool has_half_factors,
                        int64_t input_bits) {
  const auto shape = pdserve::make_shape(out_features, in_features, group_size, num_bits,
                                         has_offset, has_half_factors, input_bits);
  check_packed(packed, shape);
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kFloat && x.dim() == 2,
              "x must be float32 with 2 dims on the CPU, is ", x.scalar_type(), " with ", x.dim());
  TORCH_CHECK(x.size(1) == in_features, "width of x is ", x.size(1), ", must be ", in_features);
  TORCH_CHECK(x.numel() == 0 || x.stride(1) == 1, "x must be contiguous in its last dim");
  if (bias) check(*bias, "bias", at::kFloat, {num_panels(shape) * pdserve::panel_cols()});
  Tensor out = pdserve::empty({x.size(0), out_features}, x.options());
  const pdserve::QuantizedLinearArgs args{shape,
                                          x.const_data_ptr<float>(),
                                          x.stride(0),
                                          x.size(0),
                                          packed.const_data_ptr<uint8_t>(),
                                          bias ? bias->const_data_ptr<float>() : nullptr,
                                          out.mutable_data_ptr<float>()};
  pdserve::run([args] { pdserve::quantized_linear(args); }, {x, packed, bias.value_or(Tensor())});
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pdserve_cpu, m) {
  m.def("empty_panels(int num_panels, int panel_bytes) -> Tensor", empty_panels);
  m.def(
      "pack_quantized(Tensor values, Tensor scale, Tensor? offset, int group_size, int num_bits, "
      "bool has_half_factors) -> Tensor");
  m.def(
      "quantized_rows(Tensor packed, Tensor row_ids, int out_features, int in_features, "
      "int group_size, int num_bits, bool has_offset, bool has_half_factors) -> Tensor");
  m.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor? bias, int out_features, int in_features, "
      "int group_size, int num_bits, bool has_offset, bool has_half_factors, int input_bits) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(pdserve_cpu, CPU, m) {
  m.impl("pack_quantized", pack_quantized);
  m.impl("quantized_rows", quantized_rows);
  m.impl("quantized_linear", quantized_linear);
}
