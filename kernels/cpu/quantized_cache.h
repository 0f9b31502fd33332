// Rows of an int8 cache: how floats become one, and how keys become the panels of a product.
//
//   scale = max |x| / 127      value = round(x 127 / max |x|), half to even      x ~ value * scale
//
// NOTE: a row is a function of its own floats alone, so it has the same bytes however the prompt
// was cut into chunks.
#pragma once

#include "kernels.h"
#include "vec.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pdserve {

constexpr int64_t kBlockSide = 16;  // rows and columns of bytes transposed at once
constexpr float kMaxByte = 127.f;
constexpr float kLeastMax = 1e-30f;  // below it a row is zeros

// `values` may have any length. Overwrites x with its rounded quotients. -> the scale
inline float quantize_row(float* x, int64_t dim, int8_t* values) {
  Vec highest(0.f);
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    highest = at::vec::maximum(highest, Vec::loadu(x + d).abs());
  if (d < dim)
    highest = at::vec::maximum(highest, Vec::loadu(x + d, static_cast<int>(dim - d)).abs());
  const float max = max_lanes(highest);
  const Vec factor(kMaxByte / std::max(max, kLeastMax));
  for (d = 0; d + kLanes <= dim; d += kLanes) (Vec::loadu(x + d) * factor).round().store(x + d);
  if (d < dim) {
    const int left = static_cast<int>(dim - d);
    (Vec::loadu(x + d, left) * factor).round().store(x + d, left);
  }
  for (d = 0; d < dim; ++d) values[d] = static_cast<int8_t>(static_cast<int32_t>(x[d]));
  return max / kMaxByte;
}

#if defined(__x86_64__)
// rows[c][r] = rows[r][c] of bytes.
inline void transpose_bytes(__m128i (&rows)[kBlockSide]) {
  __m128i other[kBlockSide];
  // Each round interleaves row i with row i + 8; after four of them both indices have changed
  // place.
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      other[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
      other[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
    }
    for (int i = 0; i < kBlockSide; ++i) rows[i] = other[i];
  }
}

// Bytes [from, from + kLanes) of a register as floats.
inline Vec widen_part(__m128i bytes, int64_t from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(CPU_CAPABILITY_AVX2)
  if (from > 0) bytes = _mm_srli_si128(bytes, 8);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  alignas(16) int8_t kept[kBlockSide];
  _mm_store_si128(reinterpret_cast<__m128i*>(kept), bytes);
  return widen_bytes(kept + from);
#endif
}

// dst[c][r] = src[r][c] * scales[r] for 16 rows and columns; rows from `live` on are zeros.
inline void widen_block(const int8_t* src, int64_t ld_src, const float* scales, int64_t live,
                        float* dst, int64_t ld_dst) {
  __m128i rows[kBlockSide];
  float all_scales[kBlockSide] = {};
  std::memcpy(all_scales, scales, live * sizeof(float));
  for (int64_t r = 0; r < kBlockSide; ++r)
    rows[r] = r < live ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + r * ld_src))
                       : _mm_setzero_si128();
  transpose_bytes(rows);
  for (int64_t r = 0; r < kBlockSide; r += kLanes) {
    const Vec scale = Vec::loadu(all_scales + r);
    for (int64_t c = 0; c < kBlockSide; ++c)
      (widen_part(rows[c], r) * scale).store(dst + c * ld_dst + r);
  }
}
#endif

// dst[c][r] = src[r][c] * scales[r] for r < rows; `room`: how many dst[c] takes from there on. What
// follows the rows there may be overwritten with zeros.
inline void widen_transposed(const int8_t* src, const float* scales, int64_t rows, int64_t cols,
                             float* dst, int64_t ld_dst, int64_t room) {
  int64_t first = 0;
#if defined(__x86_64__)
  const int64_t whole_cols = cols / kBlockSide * kBlockSide;
  for (; first < rows && first + kBlockSide <= room; first += kBlockSide) {
    const int64_t live = std::min(kBlockSide, rows - first);
    const int8_t* from = src + first * cols;
    for (int64_t c = 0; c < whole_cols; c += kBlockSide)
      widen_block(from + c, cols, scales + first, live, dst + c * ld_dst + first, ld_dst);
    for (int64_t c = whole_cols; c < cols; ++c)
      for (int64_t r = 0; r < live; ++r)
        dst[c * ld_dst + first + r] = static_cast<float>(from[r * cols + c]) * scales[first + r];
  }
#endif
  for (int64_t r = first; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      dst[c * ld_dst + r] = static_cast<float>(src[r * cols + c]) * scales[r];
}

}  // namespace pdserve
