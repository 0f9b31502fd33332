// y = x W^T + b with W in 4 or 8 bits, packed once into panels; see quantized.h.
//
// The first tile of rows multiplies each weight in the registers that it was widened in, so a step
// with few rows costs what memory needs for the quantised bytes. Further tiles find the widened
// weights in the first-level cache, a slice of the panel at a time. Either way an element is the
// one chain of fused multiply-adds that linear.cpp computes on the widened weights: the same bits,
// in any batch.
#include "microkernel.h"
#include "panels.h"
#include "quantized.h"

#include <array>

namespace pdserve {
namespace {

constexpr int64_t kSliceDepth = 128;            // inputs kept at a time: half of 32 KB
constexpr int64_t kRowBlockBytes = 512 * 1024;  // of x: half a second-level cache

// Where in a panel the next weights are.
struct PanelReader {
  const QuantizedShape& shape;
  const uint8_t* group;
  int64_t first = 0;  // input that the group starts with
  int64_t done = 0;   // inputs of the group that were read; a multiple of kWordInputs
};

struct Tile {
  const float* x;
  int64_t ld_x;
  float* out;
  int64_t ld_out;
  float* slice;  // [inputs][kTileCols]
};

// Reads up to `limit` inputs, adds their products with Rows rows to out, and keeps the weights in
// the slice. Returns how many.
template <int Bits, int Rows, bool IsKept>
int64_t multiply_while_reading(PanelReader& reader, const Tile& tile, int64_t limit) {
  const QuantizedShape& shape = reader.shape;
  const int64_t ld_x = tile.ld_x;
  Register acc[Rows * kTileVecs];
  const auto at = [&](int i) {
    return tile.out + i / kTileVecs * tile.ld_out + i % kTileVecs * kLanes;
  };
  const bool is_continued = reader.first + reader.done > 0;
  c10::ForcedUnroll<Rows * kTileVecs>{}(
      [&](auto i) { acc[i] = is_continued ? Vec::loadu(at(i)) : Vec(0.f); });
  int64_t read = 0;
  while (read < limit && reader.first < shape.in_features) {
    const int64_t inputs = std::min(shape.group_size, shape.in_features - reader.first);
    const int64_t count = std::min(inputs - reader.done, limit - read);
    const GroupBytes bytes(shape, inputs);
    const int64_t start = Bits == 8 ? reader.done * kTileCols : reader.done * kTileCols / 2;
    const float* x = tile.x + read;
    float* slice = IsKept ? tile.slice + read * kTileCols : nullptr;
    for_each_input<Bits>(
        reader.group + bytes.whole - bytes.values + start, count,
        Factors(reader.group, shape, bytes), [&](int64_t k, const Register* weights) {
          if constexpr (IsKept)
            for (int v = 0; v < kTileVecs; ++v)
              Vec(weights[v]).store(slice + k * kTileCols + v * kLanes);
          c10::ForcedUnroll<Rows * kTileVecs>{}([&](auto i) {
            constexpr int r = i / kTileVecs, v = i % kTileVecs;
            acc[i] = at::vec::fmadd(Vec(x[r * ld_x + k]), Vec(weights[v]), Vec(acc[i]));
          });
        });
    read += count;
    reader.done += count;
    if (reader.done == inputs) {
      reader.group += bytes.whole;
      reader.first += inputs;
      reader.done = 0;
    }
  }
  c10::ForcedUnroll<Rows * kTileVecs>{}([&](auto i) { Vec(acc[i]).store(at(i)); });
  return read;
}

using ReadFn = int64_t (*)(PanelReader&, const Tile&, int64_t);

template <int Bits, bool IsKept, int... Rows>
constexpr std::array<ReadFn, sizeof...(Rows)> readers_of(std::integer_sequence<int, Rows...>) {
  return {multiply_while_reading<Bits, Rows + 1, IsKept>...};
}

template <int Bits>
void multiply_rows_of(const QuantizedLinearArgs& args, const uint8_t* panel, const float* x,
                      int64_t rows, float* out, int64_t ld_out) {
  constexpr auto sizes = std::make_integer_sequence<int, kTileRows>();
  static constexpr auto read = readers_of<Bits, false>(sizes);
  static constexpr auto read_and_keep = readers_of<Bits, true>(sizes);
  PanelReader reader{args.shape, panel};
  const int64_t taken = ceil_div(rows, ceil_div<int64_t>(rows, kTileRows));
  if (taken == rows) {
    read[rows - 1](reader, {x, args.ld_x, out, ld_out, nullptr}, args.shape.in_features);
    return;
  }
  alignas(64) float slice[kSliceDepth * kTileCols];
  for (int64_t k = 0; k < args.shape.in_features;) {
    const int64_t depth =
        read_and_keep[taken - 1](reader, {x + k, args.ld_x, out, ld_out, slice}, kSliceDepth);
    multiply_rows<kTileVecs>({x + taken * args.ld_x + k, args.ld_x, slice, kTileCols, depth,
                              out + taken * ld_out, ld_out, k > 0},
                             rows - taken);
    k += depth;
  }
}

// out: [rows, at least kTileCols]; the bias comes last, as in linear.cpp.
template <int Bits>
void multiply_panel(const QuantizedLinearArgs& args, int64_t panel, int64_t first_row, int64_t rows,
                    float* out, int64_t ld_out) {
  const uint8_t* packed = args.packed + panel * quantized_panel_bytes(args.shape);
  multiply_rows_of<Bits>(args, packed, args.x + first_row * args.ld_x, rows, out, ld_out);
  if (!args.bias) return;
  const float* bias = args.bias + panel * kTileCols;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < kTileCols; col += kLanes) {
      float* to = out + row * ld_out + col;
      (Vec::loadu(to) + Vec::loadu(bias + col)).store(to);
    }
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
    multiply_panel<Bits>(args, panel, first_row + row, count, wide, kTileCols);
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
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first_col = panel * kTileCols;
      if (first_col + kTileCols <= width)
        multiply_panel<Bits>(args, panel, row, rows, args.out + row * width + first_col, width);
      else
        multiply_last_panel<Bits>(args, panel, row, rows);
    }
  }
}

void multiply_panels(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  if (args.shape.num_bits == 8)
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

void unpack_row(const QuantizedShape& shape, const uint8_t* panel, int64_t col, float* out) {
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

void pack_quantized(const QuantizedShape& shape, const int8_t* values, const float* scale,
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
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t first = group * shape.group_size;
        const int64_t count = std::min(shape.group_size, shape.in_features - first);
        const GroupBytes bytes(shape, count);
        for (int64_t col = 0; col < cols; ++col) {
          const int64_t from = (row + col) * num_groups + group;
          put_factor(to, shape.has_half_factors, col, scale[from]);
          if (offset) put_factor(to + bytes.factor, shape.has_half_factors, col, offset[from]);
        }
        pack_group(shape, values + row * shape.in_features + first, count, cols,
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
