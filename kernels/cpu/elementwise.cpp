// Norms, rotary embedding with the KV write, SiLU-mul and embedding: one pass over memory each.
#include "kernels.h"
#include "quantized_cache.h"
#include "vec.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace pdserve {
namespace {

// Rows of one task: enough floats to be worth sharing.
int64_t rows_per_task(int64_t dim) {
  return std::max<int64_t>(1, 4096 / std::max<int64_t>(dim, 1));
}

// f(vector index, live lanes) over dim floats.
template <typename F>
inline void for_vectors(int64_t dim, const F& f) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) f(d, kLanes);
  if (d < dim) f(d, static_cast<int>(dim - d));
}

inline Vec load(const float* p, int live) {
  return live == kLanes ? Vec::loadu(p) : Vec::loadu(p, live);  // lanes beyond live are zero
}

inline void normalise(const float* x, float square_sum, const float* weight, float eps, int64_t dim,
                      float* out) {
  const Vec factor(1.f / std::sqrt(square_sum / static_cast<float>(dim) + eps));
  for_vectors(dim, [&](int64_t d, int live) {
    (load(x + d, live) * factor * load(weight + d, live)).store(out + d, live);
  });
}

inline void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* out) {
  for_vectors(half, [&](int64_t d, int live) {
    const Vec first = load(x + d, live), second = load(x + half + d, live);
    const Vec c = load(cos + d, live), s = load(sin + d, live);
    (first * c - second * s).store(out + d, live);
    (second * c + first * s).store(out + half + d, live);
  });
}

inline float sum_of_squares(const float* x, int64_t dim) {
  Vec squares(0.f);
  for_vectors(dim, [&](int64_t d, int live) {
    const Vec v = load(x + d, live);
    squares = at::vec::fmadd(v, v, squares);
  });
  return sum_lanes(squares);
}

inline void rotate_pairs(const float* x, const float* cos, const float* sin, int64_t half,
                         float* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[2 * i], second = x[2 * i + 1];
    out[i] = first * cos[i] - second * sin[i];
    out[half + i] = second * cos[i] + first * sin[i];
  }
}

// Row `row` of a cache: write(float*) fills it, or a buffer that becomes its bytes and scale.
template <typename F>
inline void write_row(const CacheSlots& cache, int64_t row, std::vector<float>& buffer,
                      const F& write) {
  if (!cache.scales) return write(static_cast<float*>(cache.values) + row * cache.dim);
  buffer.resize(cache.dim);
  write(buffer.data());
  cache.scales[row] =
      quantize_row(buffer.data(), cache.dim, static_cast<int8_t*>(cache.values) + row * cache.dim);
}

}  // namespace

void rms_norm(const NormRows& rows, const float* weight, float eps, float* out) {
  parallel_even(rows.outer * rows.inner, rows_per_task(rows.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x =
          rows.x + row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
      normalise(x, sum_of_squares(x, rows.dim), weight, eps, rows.dim, out + row * rows.dim);
    }
  });
}

void add_rms_norm(const float* x, int64_t ld_x, float* residual, const float* weight, float eps,
                  int64_t rows, int64_t dim, float* out) {
  parallel_even(rows, rows_per_task(dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * ld_x;
      float* total = residual + row * dim;
      Vec squares(0.f);
      for_vectors(dim, [&](int64_t d, int live) {
        const Vec v = load(from + d, live) + load(total + d, live);
        v.store(total + d, live);
        squares = at::vec::fmadd(v, v, squares);
      });
      normalise(total, sum_lanes(squares), weight, eps, dim, out + row * dim);
    }
  });
}

void rotary_kv_write(const RotaryArgs& a) {
  const int64_t half = a.head_dim / 2;
  const int64_t floats = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
  parallel_even(a.num_tokens, rows_per_task(floats), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer;
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = a.cos + t * half, *sin = a.sin + t * half;
      for (int64_t h = 0; h < a.num_heads; ++h)
        rotate(a.q + t * a.q_token_stride + h * a.q_head_stride, cos, sin, half,
               a.q_out + (t * a.num_heads + h) * a.head_dim);
      const int64_t slot = a.slot_mapping[t];
      if (slot < 0) continue;
      const int64_t block = slot / a.block_size, offset = slot % a.block_size;
      for (int64_t h = 0; h < a.num_kv_heads; ++h) {
        const int64_t row = (block * a.num_kv_heads + h) * a.block_size + offset;
        write_row(a.k_cache, row, buffer, [&](float* to) {
          rotate(a.k + t * a.k_token_stride + h * a.k_head_stride, cos, sin, half, to);
        });
        write_row(a.v_cache, row, buffer, [&](float* to) {
          std::memcpy(to, a.v + t * a.v_token_stride + h * a.v_head_stride,
                      a.head_dim * sizeof(float));
        });
      }
    }
  });
}

void interleave_rope(const HeadRows& r, const float* cos, const float* sin, float* out) {
  const int64_t half = r.dim / 2;
  parallel_even(r.num_tokens, rows_per_task(r.num_heads * r.dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < r.num_heads; ++h)
        rotate_pairs(r.x + t * r.token_stride + h * r.head_stride, cos + t * half, sin + t * half,
                     half, out + (t * r.num_heads + h) * r.dim);
  });
}

void kv_rmsnorm_rope(const LatentArgs& a) {
  const int64_t rank = a.latent_cache.dim, rope_dim = a.rope_cache.dim, half = rope_dim / 2;
  parallel_even(a.num_tokens, rows_per_task(rank + rope_dim), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slot_mapping[t];
      if (slot < 0) continue;
      const float* latent = a.kv + t * a.ld_kv;
      write_row(a.latent_cache, slot, buffer, [&](float* to) {
        normalise(latent, sum_of_squares(latent, rank), a.weight, a.eps, rank, to);
      });
      write_row(a.rope_cache, slot, buffer, [&](float* to) {
        rotate_pairs(latent + rank, a.cos + t * half, a.sin + t * half, half, to);
      });
    }
  });
}

void silu_mul(const float* gate_up, int64_t ld, int64_t rows, int64_t dim, float* out) {
  parallel_even(rows, rows_per_task(4 * dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* gate = gate_up + row * ld;
      for_vectors(dim, [&](int64_t d, int live) {
        const Vec g = load(gate + d, live);
        (g / (Vec(1.f) + g.neg().exp()) * load(gate + dim + d, live))
            .store(out + row * dim + d, live);
      });
    }
  });
}

void embedding(const float* weight, int64_t dim, const Ids& ids, float* out) {
  parallel_even(ids.count, rows_per_task(dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(out + i * dim, weight + ids[i] * dim, dim * sizeof(float));
  });
}

}  // namespace pdserve
