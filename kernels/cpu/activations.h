// Rows of x in 16 or 8 bits, for products with weights of 8 and 4 bits.
//
// A run is up to kRunInputs neighbours that share a weight's scale. Each is rounded to nearest, in
// steps of its largest magnitude / 32,767 (127 with 8 bits). Runs are padded with zeros to whole
// words of eight inputs.
//
//   values  = int16 or int8 [words][8], in the order in which the inputs of a word are multiplied
//   factors = float [runs][2]: a run's step, and step * sum of its values
#pragma once

#include "kernels.h"
#include "quantized.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pdserve {

// NOTE: 32 inputs of 8 bits times 4 bits fit 16 bits two by two: 16 * 127 * 15 < 2^15.
template <int InputBits>
constexpr int64_t kRunInputs = InputBits == 16 ? 64 : 32;

// Calls f(first input, inputs) for each run of a row.
template <int InputBits, typename F>
void each_run(const QuantizedShape& shape, const F& f) {
  for (int64_t group = 0; group < shape.in_features; group += shape.group_size) {
    const int64_t end = std::min(group + shape.group_size, shape.in_features);
    for (int64_t first = group; first < end; first += kRunInputs<InputBits>)
      f(first, std::min(kRunInputs<InputBits>, end - first));
  }
}

// `count` floats, whole words, in a word's order; returns their sum. With 16 bits two inputs that
// are multiplied together are 4 apart, with 8 bits four are 2 apart: as they lie in 32 bits of
// 4-bit values.
template <int InputBits>
int32_t round_run(const float* x, int64_t count, float inverse_step, uint8_t* to) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  const __m256 inverse = _mm256_set1_ps(inverse_step);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += kWordInputs, to += kWordInputs * InputBits / 8) {
    const __m256i wide = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
    sums = _mm256_add_epi32(sums, wide);
    __m128i word = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    if constexpr (InputBits == 16) {
      word = _mm_unpacklo_epi16(word, _mm_srli_si128(word, 8));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), word);
    } else {
      word = _mm_shuffle_epi8(_mm_packs_epi16(word, word),
                              _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), word);
    }
  }
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
  using Value = std::conditional_t<InputBits == 16, int16_t, int8_t>;
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float step = std::nearbyint(x[i] * inverse_step);
    const int64_t k = i % kWordInputs;
    const int64_t place = InputBits == 16 ? 2 * (k % 4) + k / 4 : 4 * (k % 2) + k / 2;
    const Value value = static_cast<Value>(step);
    std::memcpy(to + (i - k + place) * sizeof(Value), &value, sizeof(Value));
    sum += static_cast<int32_t>(step);
  }
  return sum;
#endif
}

// Of `count` floats, a multiple of 8; NaN if one is.
inline float largest_magnitude(const float* x, int64_t count) {
  if (count % kLanes == 0) {
    Vec largest(0.f);
    for (int64_t i = 0; i < count; i += kLanes)
      largest = at::vec::maximum(largest, Vec::loadu(x + i).abs());
    return max_lanes(largest);
  }
  float largest = 0.f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(x[i]);
    if (!(magnitude <= largest)) largest = magnitude;
    if (magnitude != magnitude) return magnitude;
  }
  return largest;
}

// x: in_features floats.
template <int InputBits>
void round_row(const QuantizedShape& shape, const float* x, uint8_t* values, float* factors) {
  // NOTE: of a run with smaller numbers than this the inverse step would be infinite: it is zeros.
  constexpr float kSmallest = 1e-30f;
  constexpr float kSteps = InputBits == 16 ? 32767.f : 127.f;
  each_run<InputBits>(shape, [&](int64_t first, int64_t inputs) {
    alignas(64) float filled[kRunInputs<InputBits>];
    const float* run = x + first;
    const int64_t padded = round_up(inputs, kWordInputs);
    if (inputs < padded) {
      std::memcpy(filled, run, inputs * sizeof(float));
      std::fill(filled + inputs, filled + padded, 0.f);
      run = filled;
    }
    const float largest = largest_magnitude(run, padded);
    const bool is_zero = largest < kSmallest;
    const float step = is_zero ? 0.f : largest / kSteps, inverse = is_zero ? 0.f : kSteps / largest;
    const int32_t sum = round_run<InputBits>(run, padded, inverse, values);
    factors[0] = step;
    factors[1] = step * static_cast<float>(sum);
    values += padded * InputBits / 8;
    factors += 2;
  });
}

}  // namespace pdserve
