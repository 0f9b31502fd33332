// The operators that choose tokens: checks their tensors and calls the kernels.
#include "checks.h"
#include "kernels.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

namespace {

using at::Tensor;

// NOTE: not recorded in graphs: a replay ends with logits.
pdserve::LogitRows rows_of(const Tensor& logits) {
  pdserve::check_float(logits, "logits", 2);
  TORCH_CHECK(logits.size(1) > 0, "logits are of no tokens");
  return {logits.const_data_ptr<float>(), logits.stride(0), logits.size(0), logits.size(1)};
}

template <typename T>
const T* column_of(const Tensor& t, const char* name, int64_t rows) {
  TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == c10::CppTypeToScalarType<T>::value &&
                  t.is_contiguous() && t.numel() == rows,
              name, " must be ", rows, " contiguous ", c10::CppTypeToScalarType<T>::value,
              " on the CPU, is ", t.sizes(), " ", t.scalar_type());
  return t.const_data_ptr<T>();
}

template <typename T>
const T* column_of(const std::optional<Tensor>& t, const char* name, int64_t rows) {
  return t ? column_of<T>(*t, name, rows) : nullptr;
}

Tensor argmax(const Tensor& logits) {
  const pdserve::LogitRows rows = rows_of(logits);
  Tensor tokens = at::empty({rows.count}, logits.options().dtype(at::kLong));
  pdserve::argmax(rows, tokens.mutable_data_ptr<int64_t>());
  return tokens;
}

Tensor draw(const Tensor& logits, const Tensor& inverse_temperature,
            const std::optional<Tensor>& log_min_p, const std::optional<Tensor>& top_k,
            const std::optional<Tensor>& top_p, const Tensor& numbers) {
  const pdserve::LogitRows rows = rows_of(logits);
  Tensor tokens = at::empty({rows.count}, logits.options().dtype(at::kLong));
  pdserve::draw({rows, column_of<float>(inverse_temperature, "inverse_temperature", rows.count),
                 column_of<float>(log_min_p, "log_min_p", rows.count),
                 column_of<int64_t>(top_k, "top_k", rows.count),
                 column_of<double>(top_p, "top_p", rows.count),
                 column_of<double>(numbers, "numbers", rows.count),
                 tokens.mutable_data_ptr<int64_t>()});
  return tokens;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pdserve_cpu, m) {
  m.def("argmax(Tensor logits) -> Tensor");
  m.def(
      "draw(Tensor logits, Tensor inverse_temperature, Tensor? log_min_p, Tensor? top_k, "
      "Tensor? top_p, Tensor numbers) -> Tensor");
}

TORCH_LIBRARY_IMPL(pdserve_cpu, CPU, m) {
  m.impl("argmax", argmax);
  m.impl("draw", draw);
}
