// y = (x Q^T) * scale + b with Q in int8, packed into the same panels as a float weight.
//
// A slice of a panel is widened into the first-level cache and multiplied there, so that memory
// gives a quarter of the bytes. The sums run over exact integers in float: like linear.cpp, a row
// has the same bits in any batch.
#include "kernels.h"
#include "microkernel.h"

#include <algorithm>
#include <cstring>

namespace pdserve {
namespace {

constexpr int64_t kSliceBytes = 8 * 1024;  // of widened weights: they and rows of x fit 32 KB
constexpr int64_t kSliceDepth = kSliceBytes / (kTileCols * sizeof(float));
constexpr int64_t kRowBlock = 8 * kTileRows;  // rows that share one widening of a slice
constexpr int64_t kChunksPerThread = 8;

void widen(const int8_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// The products of up to kRowBlock rows with one panel, scaled. -> out: [rows, kTileCols].
void multiply_panel(const Int8LinearArgs& args, int64_t panel, int64_t first_row, int64_t rows,
                    float* out) {
  alignas(64) float slice[kSliceDepth * kTileCols];
  const int8_t* weight = args.packed + panel * kTileCols * args.in_features;
  const float* x = args.x + first_row * args.ld_x;
  for (int64_t k = 0; k < args.in_features; k += kSliceDepth) {
    const int64_t depth = std::min(kSliceDepth, args.in_features - k);
    widen(weight + k * kTileCols, depth * kTileCols, slice);
    multiply_rows<kTileVecs>({x + k, args.ld_x, slice, kTileCols, depth, out, kTileCols, k > 0},
                             rows);
  }
  const float* scale = args.scale + panel * kTileCols;
  const float* bias = args.bias ? args.bias + panel * kTileCols : nullptr;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < kTileCols; col += kLanes) {
      float* to = out + row * kTileCols + col;
      Vec value = Vec::loadu(to) * Vec::loadu(scale + col);
      if (bias) value = value + Vec::loadu(bias + col);
      value.store(to);
    }
}

}  // namespace

void pack_weight_int8(const int8_t* weight, int64_t out_features, int64_t in_features,
                      int8_t* packed) {
  const int64_t panels = ceil_div<int64_t>(out_features, kTileCols);
  parallel_dynamic(panels, 4, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t k = 0; k < in_features; ++k)
        for (int64_t col = 0; col < kTileCols; ++col) {
          const int64_t row = panel * kTileCols + col;
          packed[(panel * in_features + k) * kTileCols + col] =
              row < out_features ? weight[row * in_features + k] : int8_t{0};
        }
  });
}

void linear_int8(const Int8LinearArgs& args) {
  const int64_t num_panels = ceil_div<int64_t>(args.out_features, kTileCols);
  const int64_t chunk = std::max<int64_t>(1, num_panels / (kChunksPerThread * num_threads()));
  parallel_dynamic(num_panels, chunk, [&](int64_t begin, int64_t end) {
    float block[kRowBlock * kTileCols];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first_col = panel * kTileCols;
      const int64_t cols = std::min<int64_t>(kTileCols, args.out_features - first_col);
      for (int64_t row = 0; row < args.rows; row += kRowBlock) {
        const int64_t rows = std::min(kRowBlock, args.rows - row);
        multiply_panel(args, panel, row, rows, block);
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(args.out + (row + r) * args.out_features + first_col, block + r * kTileCols,
                      cols * sizeof(float));
      }
    }
  });
}

}  // namespace pdserve
