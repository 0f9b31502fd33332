// y = x W^T + b with W in bfloat16 or float16, packed once into panels; see quantized.h.
//
// With few rows each weight is multiplied in the registers that it was widened in, so a step costs
// what memory needs for half the bytes. With more rows the weights are widened into the first-level
// cache, a slice of the panel at a time. Either way an element is the one chain of fused
// multiply-adds that linear.cpp computes on the widened weights: the same bits, in any batch.
#include "microkernel.h"
#include "panels.h"
#include "prefetch.h"
#include "quantized.h"

#include <array>
#include <cstring>

namespace pdserve {
namespace {

constexpr int64_t kSliceDepth = 128;            // inputs kept at a time: half of 32 KB
constexpr int64_t kRowBlockBytes = 512 * 1024;  // of x: half a second-level cache
constexpr int64_t kInputBytes = kTileCols * 2;  // of a panel
constexpr int64_t kInputsAhead = 4096 / kInputBytes;  // how far whoever reads it fetches ahead

// Rows with which two panels are multiplied at once: one alone has too few sums under way to hide
// how long an addition takes.
constexpr int kPairedRows = 2;

// Tiles of rows that each widen the weights for themselves; with more of them, a slice is widened
// for all. NOTE: AVX2 has multipliers that wait while weights are widened elsewhere.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int kMaxFusedTiles = 8;
#else
constexpr int kMaxFusedTiles = 1;
#endif

// weights: kTileVecs registers, of one input.
inline void widen(const uint8_t* from, bool is_float16, Register* weights) {
  for (int v = 0; v < kTileVecs; ++v) {
    const uint8_t* lanes = from + v * kLanes * 2;
    weights[v] = is_float16 ? widen_float16(lanes) : widen_bfloat16(lanes);
  }
}

// The product of Panels panels, which lie one after the other, with one tile of rows.
template <int Panels, int Rows>
void multiply_while_reading(const QuantizedShape& shape, const uint8_t* panel, const float* x,
                            int64_t ld_x, float* out, int64_t ld_out) {
  constexpr int kAccs = Rows * kTileVecs;  // of a panel
  Register acc[Panels * kAccs];
  c10::ForcedUnroll<Panels * kAccs>{}([&](auto i) { acc[i] = Vec(0.f); });
  const int64_t panel_bytes = shape.in_features * kInputBytes;
  for (int64_t k = 0; k < shape.in_features; ++k, panel += kInputBytes) {
    c10::ForcedUnroll<Panels>{}([&](auto p) __attribute__((always_inline)) {
      const uint8_t* from = panel + p * panel_bytes;
      // Past the end of these panels come the next ones.
      const int64_t ahead = k + kInputsAhead < shape.in_features ? 0 : (Panels - 1) * panel_bytes;
      for (int64_t i = 0; i < kInputBytes; i += kCacheLine)
        __builtin_prefetch(from + kInputsAhead * kInputBytes + ahead + i);
      Register weights[kTileVecs];
      widen(from, shape.has_half_factors, weights);
      c10::ForcedUnroll<kAccs>{}([&](auto i) __attribute__((always_inline)) {
        constexpr int r = i / kTileVecs, v = i % kTileVecs, a = p * kAccs + i;
        acc[a] = at::vec::fmadd(Vec(x[r * ld_x + k]), Vec(weights[v]), Vec(acc[a]));
      });
    });
  }
  c10::ForcedUnroll<Panels * kAccs>{}([&](auto i) {
    constexpr int p = i / kAccs, r = i % kAccs / kTileVecs, v = i % kTileVecs;
    Vec(acc[i]).store(out + r * ld_out + p * kTileCols + v * kLanes);
  });
}

using FusedFn = void (*)(const QuantizedShape&, const uint8_t*, const float*, int64_t, float*,
                         int64_t);

template <int Panels, int... Rows>
constexpr std::array<FusedFn, sizeof...(Rows)> fused_of(std::integer_sequence<int, Rows...>) {
  return {multiply_while_reading<Panels, Rows + 1>...};
}

template <int Panels, int MaxRows>
void multiply_fused(const QuantizedLinearArgs& args, const uint8_t* panel, const float* x,
                    int64_t rows, float* out, int64_t ld_out) {
  static constexpr auto tiles = fused_of<Panels>(std::make_integer_sequence<int, MaxRows>());
  tiles[rows - 1](args.shape, panel, x, args.ld_x, out, ld_out);
}

void multiply_one_panel(const QuantizedLinearArgs& args, const uint8_t* panel, const float* x,
                        int64_t rows, float* out, int64_t ld_out) {
  if (rows <= kMaxFusedTiles * kTileRows) {
    for (int64_t left = ceil_div<int64_t>(rows, kTileRows); left > 0; --left) {
      const int64_t taken = ceil_div(rows, left);
      multiply_fused<1, kTileRows>(args, panel, x, taken, out, ld_out);
      rows -= taken;
      x += taken * args.ld_x;
      out += taken * ld_out;
    }
    return;
  }
  alignas(64) float slice[kSliceDepth * kTileCols];
  for (int64_t k = 0; k < args.shape.in_features; k += kSliceDepth) {
    const int64_t depth = std::min(kSliceDepth, args.shape.in_features - k);
    for (int64_t i = 0; i < depth; ++i, panel += kInputBytes) {
      Register weights[kTileVecs];
      widen(panel, args.shape.has_half_factors, weights);
      for (int v = 0; v < kTileVecs; ++v)
        Vec(weights[v]).store(slice + i * kTileCols + v * kLanes);
    }
    // Meanwhile the next slice is fetched, or the next panel's first: they lie one after the other.
    multiply_rows<kTileVecs>({x + k, args.ld_x, slice, kTileCols, depth, out, ld_out, k > 0,
                              reinterpret_cast<const char*>(panel), depth * kInputBytes},
                             rows);
  }
}

// Of num_panels panels: one, or two if there are few rows. out: [rows, at least their columns].
void multiply_panel(const QuantizedLinearArgs& args, int64_t panel, int64_t num_panels,
                    int64_t first_row, int64_t rows, float* out, int64_t ld_out) {
  const uint8_t* packed = args.packed + panel * quantized_panel_bytes(args.shape);
  const float* x = args.x + first_row * args.ld_x;
  if (num_panels == 2)
    multiply_fused<2, kPairedRows>(args, packed, x, rows, out, ld_out);
  else
    multiply_one_panel(args, packed, x, rows, out, ld_out);
  if (args.bias)
    add_bias(args.bias + panel * kTileCols, num_panels * kTileCols, rows, out, ld_out);
}

// The last panel may be wider than what is left of out.
void multiply_last_panel(const QuantizedLinearArgs& args, int64_t panel, int64_t first_row,
                         int64_t rows) {
  constexpr int64_t kRows = 2 * kTileRows;
  float wide[kRows * kTileCols];
  const int64_t first_col = panel * kTileCols, width = args.shape.out_features;
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t count = std::min(kRows, rows - row);
    multiply_panel(args, panel, 1, first_row + row, count, wide, kTileCols);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(args.out + (first_row + row + r) * width + first_col, wide + r * kTileCols,
                  (width - first_col) * sizeof(float));
  }
}

void multiply_panels(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.shape.out_features;
  const int64_t row_bytes = args.shape.in_features * static_cast<int64_t>(sizeof(float));
  const int64_t block = std::max<int64_t>(8, kRowBlockBytes / row_bytes / kTileRows) * kTileRows;
  for (int64_t row = 0; row < args.rows; row += block) {
    const int64_t rows = std::min(block, args.rows - row);
    for (int64_t panel = begin; panel < end;) {
      const int64_t first_col = panel * kTileCols;
      const bool is_pair = rows <= kPairedRows && panel + 2 <= end &&
                           first_col + 2 * kTileCols <= width;
      const int64_t taken = is_pair ? 2 : 1;
      if (first_col + taken * kTileCols <= width)
        multiply_panel(args, panel, taken, row, rows, args.out + row * width + first_col,
                             width);
      else
        multiply_last_panel(args, panel, row, rows);
      panel += taken;
    }
  }
}

}  // namespace

void half_linear_each(const std::vector<QuantizedLinearArgs>& products) {
  each_product(products.data(), products.size(), multiply_panels);
}

}  // namespace pdserve
