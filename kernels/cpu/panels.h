// Products whose weights lie in panels, shared out among threads.
#pragma once

#include "vec.h"

#include <algorithm>

namespace pdserve {

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
