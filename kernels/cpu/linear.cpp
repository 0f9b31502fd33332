// y = x W^T + b with W packed once into panels of a few output columns, for every batch size.
//
// A panel [in_features, kTileCols] is contiguous, so at small batches W streams from memory once,
// and a slice of a panel stays in the first-level cache while all rows pass over it. See
// microkernel.h for why results do not depend on the batch.
#include "kernels.h"
#include "microkernel.h"
#include "panels.h"

#include <algorithm>
#include <cstring>

namespace pdserve {
namespace {

constexpr int64_t kSliceBytes = 8 * 1024;  // of a panel: this one, the next and rows of x fit 32 KB
constexpr int64_t kRowBlockBytes = 256 * 1024;  // of x: half a second-level cache
constexpr int64_t kSliceDepth = kSliceBytes / (kTileCols * sizeof(float));
constexpr int64_t kFloatsAhead = 1024;  // how far a single tile fetches ahead of what it reads

int64_t rows_per_block(int64_t in_features) {
  const int64_t rows = kRowBlockBytes / (in_features * static_cast<int64_t>(sizeof(float)));
  return std::max<int64_t>(4 * kTileRows, rows / kTileRows * kTileRows);
}

// out: [rows, at least kTileCols].
void multiply_panel(const LinearArgs& args, int64_t panel, int64_t first_row, int64_t rows,
                    float* out, int64_t ld_out) {
  const float* x = args.x + first_row * args.ld_x;
  const float* weight = args.packed + panel * kTileCols * args.in_features;
  // A single tile streams through the panel once, so nothing of it need stay.
  const bool is_one_tile = rows <= kTileRows;
  const int64_t slice = is_one_tile ? args.in_features : kSliceDepth;
  for (int64_t k = 0; k < args.in_features; k += slice) {
    const int64_t depth = std::min(slice, args.in_features - k);
    // Into the next slice, or the next panel's first: panels lie one after the other.
    const float* next = weight + k * kTileCols + (is_one_tile ? kFloatsAhead : depth * kTileCols);
    multiply_rows<kTileVecs>(
        {x + k, args.ld_x, weight + k * kTileCols, kTileCols, depth, out, ld_out, k > 0,
         reinterpret_cast<const char*>(next), depth * kTileCols * int64_t{sizeof(float)}},
        rows);
  }
  if (args.bias) add_bias(args.bias + panel * kTileCols, kTileCols, rows, out, ld_out);
}

// The last panel may be wider than what is left of out.
void multiply_last_panel(const LinearArgs& args, int64_t panel, int64_t first_row, int64_t rows) {
  constexpr int64_t kRows = 2 * kTileRows;
  float wide[kRows * kTileCols];
  const int64_t first_col = panel * kTileCols, cols = args.out_features - first_col;
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t count = std::min(kRows, rows - row);
    multiply_panel(args, panel, first_row + row, count, wide, kTileCols);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(args.out + (first_row + row + r) * args.out_features + first_col,
                  wide + r * kTileCols, cols * sizeof(float));
  }
}

void multiply_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t block = rows_per_block(args.in_features);
  for (int64_t row = 0; row < args.rows; row += block) {
    const int64_t rows = std::min(block, args.rows - row);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first_col = panel * kTileCols;
      if (first_col + kTileCols <= args.out_features)
        multiply_panel(args, panel, row, rows, args.out + row * args.out_features + first_col,
                       args.out_features);
      else
        multiply_last_panel(args, panel, row, rows);
    }
  }
}

}  // namespace

int64_t panel_cols() { return kTileCols; }

void pack_weight(const float* weight, int64_t ld, int64_t out_features, int64_t in_features,
                 float* packed) {
  parallel_dynamic(ceil_div<int64_t>(out_features, kTileCols), 4, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kTileCols;
      transpose_padded(weight + first * ld, ld, std::min<int64_t>(kTileCols, out_features - first),
                       in_features, packed + first * in_features, kTileCols, kTileCols, [] {});
    }
  });
}

void packed_rows(const float* packed, int64_t in_features, const Ids& ids, float* out) {
  parallel_even(ids.count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* from =
          packed + ids[i] / kTileCols * kTileCols * in_features + ids[i] % kTileCols;
      for (int64_t k = 0; k < in_features; ++k) out[i * in_features + k] = from[k * kTileCols];
    }
  });
}

void linear(const LinearArgs& args) { each_product(&args, 1, multiply_panels); }

void linear_each(const std::vector<LinearArgs>& products) {
  each_product(products.data(), products.size(), multiply_panels);
}

}  // namespace pdserve
