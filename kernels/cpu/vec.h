// Vector width, register tile and small helpers shared by the kernels; everything here is per CPU
// capability.
#pragma once

// NOTE: vec.h before functional.h; on AVX2 the other order meets an include cycle of theirs.
#include <ATen/cpu/vec/vec.h>

#include <ATen/cpu/vec/functional.h>
#include <c10/util/Unroll.h>

#include "threads.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace pdserve {

using Vec = at::vec::Vectorized<float>;

constexpr int kLanes = Vec::size();

// What a Vec holds. NOTE: arrays of accumulators are arrays of this: GCC keeps an array of the
// class in memory.
#if defined(CPU_CAPABILITY_AVX512)
using Register = __m512;
#elif defined(CPU_CAPABILITY_AVX2)
using Register = __m256;
#elif defined(__aarch64__)
using Register = float32x4_t;
#else
using Register = Vec;
#endif

// The register tile of the microkernel: kTileRows x kTileVecs accumulators, and room for a row of B
// and a broadcast.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRegisters = 32, kTileRows = 12, kTileVecs = 2;
#elif defined(__aarch64__)
constexpr int kRegisters = 32, kTileRows = 6, kTileVecs = 4;  // of 4 lanes
#else
constexpr int kRegisters = 16, kTileRows = 6, kTileVecs = 2;
#endif
constexpr int kTileCols = kTileVecs * kLanes;

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

template <typename T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// kLanes int8 as floats.
inline Vec widen_bytes(const void* from) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<const int8_t*>(from)[i];
  return Vec::loadu(wide);
#endif
}

// kLanes numbers of either kind as floats.
inline Vec load_wide(const float* from) { return Vec::loadu(from); }
inline Vec load_wide(const int8_t* from) { return widen_bytes(from); }

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// Halves of rows r and r + 4 side by side, so that the loads do a third of the shuffling.
inline __m256 load_halves(const float* src, int64_t ld_src) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(src)),
                              _mm_loadu_ps(src + 4 * ld_src), 1);
}

// dst[c][r] = src[r][c] for 8 rows and 4 columns.
inline void transpose_8x4(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
  const __m256 a = load_halves(src, ld_src), b = load_halves(src + ld_src, ld_src);
  const __m256 c = load_halves(src + 2 * ld_src, ld_src), d = load_halves(src + 3 * ld_src, ld_src);
  const __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
  const __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
  _mm256_storeu_ps(dst, _mm256_shuffle_ps(ab_low, cd_low, 0x44));
  _mm256_storeu_ps(dst + ld_dst, _mm256_shuffle_ps(ab_low, cd_low, 0xee));
  _mm256_storeu_ps(dst + 2 * ld_dst, _mm256_shuffle_ps(ab_high, cd_high, 0x44));
  _mm256_storeu_ps(dst + 3 * ld_dst, _mm256_shuffle_ps(ab_high, cd_high, 0xee));
}
#endif

// dst[c][r] = src[r][c] for a kLanes x kLanes block.
inline void transpose_block(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  for (int r = 0; r < kLanes; r += 8)
    for (int c = 0; c < kLanes; c += 4)
      transpose_8x4(src + r * ld_src + c, ld_src, dst + c * ld_dst + r, ld_dst);
#else
  for (int r = 0; r < kLanes; ++r)
    for (int c = 0; c < kLanes; ++c) dst[c * ld_dst + r] = src[r * ld_src + c];
#endif
}

// The same where src has only `live` rows; zeros for the others.
inline void transpose_partly(const float* src, int64_t ld_src, int64_t live, float* dst,
                             int64_t ld_dst) {
  if (live == 0) {
    for (int c = 0; c < kLanes; ++c) Vec(0.f).store(dst + c * ld_dst);
    return;
  }
  alignas(64) float block[kLanes * kLanes];
  for (int64_t r = 0; r < kLanes; ++r)
    (r < live ? Vec::loadu(src + r * ld_src) : Vec(0.f)).store(block + r * kLanes);
  transpose_block(block, kLanes, dst, ld_dst);
}

// dst[c][r] = src[r][c] for r < rows, and 0 for rows <= r < padded_rows. Calls after_block()
// between blocks of kLanes x kLanes.
template <typename F>
void transpose_padded(const float* src, int64_t ld_src, int64_t rows, int64_t cols, float* dst,
                      int64_t ld_dst, int64_t padded_rows, const F& after_block) {
  const int64_t whole_cols = cols / kLanes * kLanes;
  int64_t r = 0;
  for (; r + kLanes <= padded_rows; r += kLanes) {
    const int64_t live = std::clamp<int64_t>(rows - r, 0, kLanes);
    for (int64_t c = 0; c < whole_cols; c += kLanes) {
      const float* from = src + r * ld_src + c;
      float* to = dst + c * ld_dst + r;
      if (live == kLanes)
        transpose_block(from, ld_src, to, ld_dst);
      else
        transpose_partly(from, ld_src, live, to, ld_dst);
      after_block();
    }
    for (int64_t c = whole_cols; c < cols; ++c)
      for (int64_t i = 0; i < kLanes; ++i)
        dst[c * ld_dst + r + i] = i < live ? src[(r + i) * ld_src + c] : 0.f;
  }
  for (; r < padded_rows; ++r)
    for (int64_t c = 0; c < cols; ++c) dst[c * ld_dst + r] = r < rows ? src[r * ld_src + c] : 0.f;
}

inline float sum_lanes(const Vec& v) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, v);
}

inline float max_lanes(const Vec& v) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, v);
}

// Calls f(begin, end) for chunks of [0, count) on all threads; whoever is free takes the next
// chunk.
template <typename F>
void parallel_dynamic(int64_t count, int64_t chunk, const F& f) {
  if (count <= 0) return;
  chunk = std::max(chunk, ceil_div(count, kMaxChunks));
  struct Region {
    int64_t count, chunk;
    const F& f;
  };
  const Region region{count, chunk, f};
  run_chunks(ceil_div(count, chunk), &region, [](const void* context, int64_t i) {
    const auto& r = *static_cast<const Region*>(context);
    r.f(i * r.chunk, std::min(r.count, (i + 1) * r.chunk));
  });
}

// The same for work of equal size: a chunk has at least `grain`, and each thread gets few.
template <typename F>
void parallel_even(int64_t count, int64_t grain, const F& f) {
  parallel_dynamic(count, std::max(grain, ceil_div(count, 2 * num_threads())), f);
}

}  // namespace pdserve
