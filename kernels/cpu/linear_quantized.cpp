// y = x W^T + b with W in 4, 8 or 16 bits, packed once into panels; see quantized.h.
//
// With few rows each weight is multiplied in the registers that it was widened in, so a step costs
// what memory needs for the quantised bytes. With more rows the weights are widened into the
// first-level cache, a slice of the panel at a time. Either way an element is the one chain of fused
// multiply-adds that linear.cpp computes on the widened weights: the same bits, in any batch.
#include "microkernel.h"
#include "panels.h"
#include "quantized.h"

#include <array>

namespace pdserve {
namespace {

constexpr int64_t kSliceDepth = 128;            // inputs kept at a time: half of 32 KB
constexpr int64_t kRowBlockBytes = 512 * 1024;  // of x: half a second-level cache

// Rows with which two panels are multiplied at once: one alone has too few sums under way to hide
// how long an addition takes.
template <int Bits>
constexpr int kPairedRows = Bits == 4 ? 1 : 2;

// Tiles of rows that each widen the weights for themselves; with more of them, a slice is widened
// for all. NOTE: AVX2 has multipliers that wait while 16 bits are widened elsewhere.
#if defined(CPU_CAPABILITY_AVX2)
template <int Bits>
constexpr int kMaxFusedTiles = Bits == 16 ? 8 : 2;
#else
template <int Bits>
constexpr int kMaxFusedTiles = 1;
#endif

// The product of Panels panels, which lie one after the other, with one tile of rows, each weight in
// the registers that it was widened in.
template <int Bits, int Panels, int Rows>
void multiply_while_reading(const QuantizedShape& shape, const uint8_t* panel, const float* x,
                            int64_t ld_x, float* out, int64_t ld_out) {
  constexpr int kAccs = Rows * kTileVecs;  // of a panel
  Register acc[Panels * kAccs];
  c10::ForcedUnroll<Panels * kAccs>{}([&](auto i) { acc[i] = Vec(0.f); });
  const int64_t skipped = (Panels - 1) * quantized_panel_bytes(shape);
  constexpr bool kIsCrowded = Panels * kAccs + 7 > kRegisters;
  PanelReader<Bits, kIsCrowded> first(shape, panel, skipped), last(shape, panel + skipped, skipped);
  const auto read = [&](auto& reader, auto panel) {
    return reader.read_word([&](int64_t k, const Register* weights) __attribute__((always_inline)) {
      c10::ForcedUnroll<kAccs>{}([&](auto i) {
        constexpr int r = i / kTileVecs, v = i % kTileVecs, a = panel * kAccs + i;
        acc[a] = at::vec::fmadd(Vec(x[r * ld_x + k]), Vec(weights[v]), Vec(acc[a]));
      });
    });
  };
  while (first.has_inputs()) {
    const int64_t taken = read(first, std::integral_constant<int, 0>());
    if constexpr (Panels == 2) read(last, std::integral_constant<int, 1>());
    x += taken;
  }
  c10::ForcedUnroll<Panels * kAccs>{}([&](auto i) {
    constexpr int p = i / kAccs, r = i % kAccs / kTileVecs, v = i % kTileVecs;
    Vec(acc[i]).store(out + r * ld_out + p * kTileCols + v * kLanes);
  });
}

using FusedFn = void (*)(const QuantizedShape&, const uint8_t*, const float*, int64_t, float*,
                         int64_t);

template <int Bits, int Panels, int... Rows>
constexpr std::array<FusedFn, sizeof...(Rows)> fused_of(std::integer_sequence<int, Rows...>) {
  return {multiply_while_reading<Bits, Panels, Rows + 1>...};
}

template <int Bits, int Panels, int MaxRows>
void multiply_fused(const QuantizedLinearArgs& args, const uint8_t* panel, const float* x,
                    int64_t rows, float* out, int64_t ld_out) {
  static constexpr auto tiles =
      fused_of<Bits, Panels>(std::make_integer_sequence<int, MaxRows>());
  tiles[rows - 1](args.shape, panel, x, args.ld_x, out, ld_out);
}

template <int Bits>
void multiply_rows_of(const QuantizedLinearArgs& args, const uint8_t* panel, const float* x,
                      int64_t rows, float* out, int64_t ld_out) {
  if (rows <= kMaxFusedTiles<Bits> * kTileRows) {
    for (int64_t left = ceil_div<int64_t>(rows, kTileRows); left > 0; --left) {
      const int64_t taken = ceil_div(rows, left);
      multiply_fused<Bits, 1, kTileRows>(args, panel, x, taken, out, ld_out);
      rows -= taken;
      x += taken * args.ld_x;
      out += taken * ld_out;
    }
    return;
  }
  PanelReader<Bits, false> reader(args.shape, panel);
  alignas(64) float slice[kSliceDepth * kTileCols];
  for (int64_t k = 0; k < args.shape.in_features;) {
    int64_t depth = 0;
    while (depth < kSliceDepth && reader.has_inputs())
      depth += reader.read_word([&](int64_t i, const Register* weights) {
        for (int v = 0; v < kTileVecs; ++v)
          Vec(weights[v]).store(slice + (depth + i) * kTileCols + v * kLanes);
      });
    // Meanwhile the next slice is fetched, or the next panel's first: they lie one after the other.
    multiply_rows<kTileVecs>(
        {x + k, args.ld_x, slice, kTileCols, depth, out, ld_out, k > 0,
         reinterpret_cast<const char*>(reader.next()), depth * kTileCols * Bits / 8},
        rows);
    k += depth;
  }
}

// Of num_panels panels: one, or two if there are few rows. out: [rows, at least their columns].
template <int Bits>
void multiply_panel(const QuantizedLinearArgs& args, int64_t panel, int64_t num_panels,
                    int64_t first_row, int64_t rows, float* out, int64_t ld_out) {
  const uint8_t* packed = args.packed + panel * quantized_panel_bytes(args.shape);
  const float* x = args.x + first_row * args.ld_x;
  if (num_panels == 2)
    multiply_fused<Bits, 2, kPairedRows<Bits>>(args, packed, x, rows, out, ld_out);
  else
    multiply_rows_of<Bits>(args, packed, x, rows, out, ld_out);
  if (args.bias)
    add_bias(args.bias + panel * kTileCols, num_panels * kTileCols, rows, out, ld_out);
}

// The last panel may be wider than what is left of out.
template <int Bits>
void multiply_last_panel(const QuantizedLinearArgs& args, int64_t panel, int64_t first_row,
                         int64_t rows) {
  constexpr int64_t kRows = 2 * kTileRows;
  float wide[kRows * kTileCols];
  const int64_t first_col = panel * kTileCols, width = args.shape.out_features;
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t count = std::min(kRows, rows - row);
    multiply_panel<Bits>(args, panel, 1, first_row + row, count, wide, kTileCols);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(args.out + (first_row + row + r) * width + first_col, wide + r * kTileCols,
                  (width - first_col) * sizeof(float));
  }
}

template <int Bits>
void multiply_panels_of(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.shape.out_features;
  const int64_t row_bytes = args.shape.in_features * static_cast<int64_t>(sizeof(float));
  const int64_t block = std::max<int64_t>(8, kRowBlockBytes / row_bytes / kTileRows) * kTileRows;
  for (int64_t row = 0; row < args.rows; row += block) {
    const int64_t rows = std::min(block, args.rows - row);
    for (int64_t panel = begin; panel < end;) {
      const int64_t first_col = panel * kTileCols;
      const bool is_pair = rows <= kPairedRows<Bits> && panel + 2 <= end &&
                           first_col + 2 * kTileCols <= width;
      const int64_t taken = is_pair ? 2 : 1;
      if (first_col + taken * kTileCols <= width)
        multiply_panel<Bits>(args, panel, taken, row, rows, args.out + row * width + first_col,
                             width);
      else
        multiply_last_panel<Bits>(args, panel, row, rows);
      panel += taken;
    }
  }
}

void multiply_panels(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  if (args.shape.num_bits == 16)
    multiply_panels_of<16>(args, begin, end);
  else if (args.shape.num_bits == 8)
    multiply_panels_of<8>(args, begin, end);
  else
    multiply_panels_of<4>(args, begin, end);
}

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

void quantized_linear(const QuantizedLinearArgs& args) { each_product(&args, 1, multiply_panels); }

void quantized_linear_each(const std::vector<QuantizedLinearArgs>& products) {
  each_product(products.data(), products.size(), multiply_panels);
}

}  // namespace pdserve
