// A matrix per head, as it lies in memory: latent attention's up-projections in decode steps.
//
// The matrices are read once, in order: some of their rows at a time for all columns of the result,
// which stays in the first-level cache. See microkernel.h for why results do not depend on that.
#include "kernels.h"
#include "microkernel.h"

#include <algorithm>
#include <cmath>

namespace pdserve {
namespace {

constexpr int64_t kSliceBytes = 8 * 1024;  // of a matrix
constexpr int64_t kRowsAtATime = 4 * kTileRows;

// Columns [first, first + cols) of one head's result, for some rows.
void multiply_head(const HeadProduct& p, int64_t head, int64_t first, int64_t cols, int64_t row,
                   int64_t rows) {
  const int64_t width = p.out_dim, ld_out = p.x.num_heads * width;
  const float* x = p.x.x + row * p.x.token_stride + head * p.x.head_stride;
  const float* weight = p.weight + head * p.x.dim * width + first;
  float* out = p.out + row * ld_out + head * width + first;
  const int64_t vectors = cols / kLanes * kLanes;
  const int64_t slice =
      std::max<int64_t>(4, kSliceBytes / (cols * static_cast<int64_t>(sizeof(float))));
  for (int64_t k = 0; k < p.x.dim; k += slice) {
    const int64_t depth = std::min(slice, p.x.dim - k);
    multiply(Product{x + k, p.x.token_stride, weight + k * width, width, depth, out, ld_out, k > 0},
             rows, vectors);
    for (int64_t col = vectors; col < cols; ++col)
      for (int64_t r = 0; r < rows; ++r) {
        float sum = k > 0 ? out[r * ld_out + col] : 0.f;
        for (int64_t d = k; d < k + depth; ++d)
          sum = std::fma(x[r * p.x.token_stride + d], weight[d * width + col], sum);
        out[r * ld_out + col] = sum;
      }
  }
}

}  // namespace

void head_matmul(const HeadProduct& p) {
  // Heads are cut only where there are too few of them for all threads.
  const int64_t wanted = ceil_div<int64_t>(4 * num_threads(), std::max<int64_t>(p.x.num_heads, 1));
  const int64_t cols = round_up<int64_t>(ceil_div(p.out_dim, wanted), kTileCols);
  const int64_t parts = ceil_div(p.out_dim, cols);
  parallel_dynamic(p.x.num_heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * cols;
      for (int64_t row = 0; row < p.x.num_tokens; row += kRowsAtATime)
        multiply_head(p, i / parts, first, std::min(cols, p.out_dim - first), row,
                      std::min(kRowsAtATime, p.x.num_tokens - row));
    }
  });
}

}  // namespace pdserve
