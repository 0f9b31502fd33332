// Products whose weights lie in panels, shared out among threads.
#pragma once

#include "vec.h"

#include <algorithm>

namespace pdserve {

// out: [rows, at least cols]; cols must be a multiple of kLanes.
//
// NOTE: last, not as the start of the sums: biases of 100 and more exist, and would cost every
// partial sum its low bits.
inline void add_bias(const float* bias, int64_t cols, int64_t rows, float* out, int64_t ld_out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; col += kLanes) {
      float* to = out + row * ld_out + col;
      (Vec::loadu(to) + Vec::loadu(bias + col)).store(to);
    }
}

// Calls multiply(product, first panel, end) for all panels of products with equally many outputs.
template <typename Args, typename F>
void each_product(const Args* products, int64_t count, const F& multiply) {
  constexpr int64_t kChunksPerThread = 8;
  if (count == 0) return;
  const int64_t num_panels = ceil_div<int64_t>(out_features_of(products[0]), kTileCols);
  const int64_t all = count * num_panels;
  const int64_t chunk = std::max<int64_t>(1, all / (kChunksPerThread * num_threads()));
  parallel_dynamic(all, chunk, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t panel = begin % num_panels;
      const int64_t taken = std::min(end - begin, num_panels - panel);
      multiply(products[begin / num_panels], panel, panel + taken);
      begin += taken;
    }
  });
}

}  // namespace pdserve
