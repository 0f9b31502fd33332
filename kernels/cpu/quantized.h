// Quantised weights in panels.
//
//   panel (kTileCols outputs) = group, group, ...      one after the other, read once, in order
//   group (group_size inputs) = scale[kTileCols], offset[kTileCols] if any, values
//   values, 8 bits            = int8 [inputs][kTileCols]
//   values, 4 bits            = uint32 [ceil(inputs / 8)][kTileCols], input i in bits 4 (i % 8)
//   values, 16 bits           = bfloat16 or float16 [inputs][kTileCols], without scale and offset
//
// A weight of 16 bits is its value, others are value * scale + offset.
#pragma once

#include "kernels.h"
#include "vec.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace pdserve {

constexpr int64_t kWordInputs = 8;  // 4-bit values in a word

// Sizes in bytes of one group of a panel.
struct GroupBytes {
  int64_t factor, values, whole;

  GroupBytes(const QuantizedShape& shape, int64_t inputs) {
    factor = shape.num_bits == 16 ? 0 : kTileCols * (shape.has_half_factors ? 2 : 4);
    values = shape.num_bits == 4 ? ceil_div(inputs, kWordInputs) * kTileCols * 4
                                 : inputs * kTileCols * shape.num_bits / 8;
    whole = factor * (shape.has_offset ? 2 : 1) + values;
  }
};

// kLanes float16 as floats.
inline Vec widen_float16(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  const c10::Half* half = reinterpret_cast<const c10::Half*>(from);
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = half[i];
  return Vec::loadu(wide);
#endif
}

// kLanes bfloat16 as floats: these are the upper halves of them.
inline Vec widen_bfloat16(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  const c10::BFloat16* half = reinterpret_cast<const c10::BFloat16*>(from);
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = half[i];
  return Vec::loadu(wide);
#endif
}

inline Vec load_factor(const uint8_t* from, bool is_half, int64_t index) {
  if (is_half) return widen_float16(from + index * kLanes * 2);
  return Vec::loadu(reinterpret_cast<const float*>(from) + index * kLanes);
}

}  // namespace pdserve
