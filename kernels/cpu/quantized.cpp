// Quantised weights: into panels, out of them, and the kernel that multiplies with each.
#include "quantized.h"
#include "kernels.h"

#include <cmath>
#include <cstring>

namespace pdserve {
namespace {

void put_factor(uint8_t* to, bool is_half, int64_t index, float value) {
  if (is_half)
    reinterpret_cast<c10::Half*>(to)[index] = value;
  else
    reinterpret_cast<float*>(to)[index] = value;
}

float get_factor(const uint8_t* from, bool is_half, int64_t index) {
  return is_half ? static_cast<float>(reinterpret_cast<const c10::Half*>(from)[index])
                 : reinterpret_cast<const float*>(from)[index];
}

void pack_group(const QuantizedShape& shape, const int8_t* values, int64_t count, int64_t cols,
                uint8_t* to) {
  for (int64_t col = 0; col < cols; ++col)
    for (int64_t k = 0; k < count; ++k) {
      const uint8_t value = static_cast<uint8_t>(values[col * shape.in_features + k]);
      if (shape.num_bits == 8)
        to[k * kTileCols + col] = value;
      else
        reinterpret_cast<uint32_t*>(to)[k / kWordInputs * kTileCols + col] |=
            static_cast<uint32_t>(value & 15) << (4 * (k % kWordInputs));
    }
}

// One group: the whole row.
void pack_halves(const QuantizedShape& shape, const uint16_t* values, int64_t cols, uint8_t* to) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  for (int64_t col = 0; col < cols; ++col)
    for (int64_t k = 0; k < shape.in_features; ++k)
      halves[k * kTileCols + col] = values[col * shape.in_features + k];
}

void unpack_halves(const QuantizedShape& shape, const uint8_t* panel, int64_t col, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(panel) + col;
  for (int64_t k = 0; k < shape.in_features; ++k) {
    const uint16_t bits = halves[k * kTileCols];
    out[k] = shape.has_half_factors ? static_cast<float>(c10::Half(bits, c10::Half::from_bits()))
                                    : static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
  }
}

void unpack_row(const QuantizedShape& shape, const uint8_t* panel, int64_t col, float* out) {
  if (shape.num_bits == 16) return unpack_halves(shape, panel, col, out);
  for (int64_t first = 0; first < shape.in_features; first += shape.group_size) {
    const int64_t count = std::min(shape.group_size, shape.in_features - first);
    const GroupBytes bytes(shape, count);
    const float scale = get_factor(panel, shape.has_half_factors, col);
    const float offset =
        shape.has_offset ? get_factor(panel + bytes.factor, shape.has_half_factors, col) : 0.f;
    const uint8_t* values = panel + bytes.whole - bytes.values;
    for (int64_t k = 0; k < count; ++k) {
      float value;
      if (shape.num_bits == 8)
        value = static_cast<int8_t>(values[k * kTileCols + col]);
      else
        value = reinterpret_cast<const uint32_t*>(values)[k / kWordInputs * kTileCols + col] >>
                    (4 * (k % kWordInputs)) &
                15u;
      out[first + k] = std::fma(value, scale, offset);
    }
    panel += bytes.whole;
  }
}

}  // namespace

int64_t quantized_panel_bytes(const QuantizedShape& shape) {
  const int64_t rest = shape.in_features % shape.group_size;
  return shape.in_features / shape.group_size * GroupBytes(shape, shape.group_size).whole +
         (rest ? GroupBytes(shape, rest).whole : 0);
}

void pack_quantized(const QuantizedShape& shape, const void* values, const float* scale,
                    const float* offset, uint8_t* packed) {
  const int64_t num_groups = ceil_div(shape.in_features, shape.group_size);
  const int64_t panel_bytes = quantized_panel_bytes(shape);
  const int64_t panels = ceil_div<int64_t>(shape.out_features, kTileCols);
  parallel_dynamic(panels, 4, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      uint8_t* to = packed + panel * panel_bytes;
      std::memset(to, 0, panel_bytes);
      const int64_t row = panel * kTileCols;
      const int64_t cols = std::min<int64_t>(kTileCols, shape.out_features - row);
      const int64_t first_value = row * shape.in_features;
      if (shape.num_bits == 16) {
        pack_halves(shape, static_cast<const uint16_t*>(values) + first_value, cols, to);
        continue;
      }
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t first = group * shape.group_size;
        const int64_t count = std::min(shape.group_size, shape.in_features - first);
        const GroupBytes bytes(shape, count);
        for (int64_t col = 0; col < cols; ++col) {
          const int64_t from = (row + col) * num_groups + group;
          put_factor(to, shape.has_half_factors, col, scale[from]);
          if (offset) put_factor(to + bytes.factor, shape.has_half_factors, col, offset[from]);
        }
        pack_group(shape, static_cast<const int8_t*>(values) + first_value + first, count, cols,
                   to + bytes.whole - bytes.values);
        to += bytes.whole;
      }
    }
  });
}

void quantized_rows(const QuantizedShape& shape, const uint8_t* packed, const Ids& ids,
                    float* out) {
  const int64_t panel_bytes = quantized_panel_bytes(shape);
  parallel_even(ids.count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      unpack_row(shape, packed + ids[i] / kTileCols * panel_bytes, ids[i] % kTileCols,
                 out + i * shape.in_features);
  });
}

void quantized_linear(const QuantizedLinearArgs& args) { quantized_linear_each({args}); }

void quantized_linear_each(const std::vector<QuantizedLinearArgs>& products) {
  std::vector<QuantizedLinearArgs> halves, integers;
  for (const QuantizedLinearArgs& product : products)
    (product.shape.num_bits == 16 ? halves : integers).push_back(product);
  half_linear_each(halves);
  integer_linear_each(integers);
}

}  // namespace pdserve
