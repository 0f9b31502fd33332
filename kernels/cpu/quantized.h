// Quantised weights in panels: where a panel's bytes are and how they become floats.
//
//   panel (kTileCols outputs) = group, group, ...      one after the other, read once, in order
//   group (group_size inputs) = scale[kTileCols], offset[kTileCols] if any, values
//   values, 8 bits            = int8 [inputs][kTileCols]
//   values, 4 bits            = uint32 [ceil(inputs / 8)][kTileCols], input i in bits 4 (i % 8)
//   values, 16 bits           = bfloat16 or float16 [inputs][kTileCols], without scale and offset
//
// A weight of 16 bits is its value, others are fma(value, scale, offset). NOTE: with scales of 11 bits (float16) the product is
// exact, so this has the bits of value * scale + offset in plain float arithmetic.
#pragma once

#include "kernels.h"
#include "vec.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pdserve {

constexpr int64_t kWordInputs = 8;     // 4-bit values in a word
constexpr int64_t kBytesAhead = 4096;  // how far whoever reads a panel fetches ahead

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

// kLanes words of eight 4-bit values each.
struct Words {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i bits;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i bits;
#else
  uint32_t bits[kLanes];
#endif

  static Words load(const uint8_t* from) {
    Words words;
    std::memcpy(&words.bits, from, sizeof(words.bits));
    return words;
  }

  // The lowest value of each word as a float, which is then dropped.
  Vec pop() {
#if defined(CPU_CAPABILITY_AVX512)
    // A table look-up reads the low 4 bits of each lane only: no mask, no conversion.
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 value = _mm512_permutexvar_ps(bits, table);
    bits = _mm512_srli_epi32(bits, 4);
    return value;
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i value = _mm256_and_si256(bits, _mm256_set1_epi32(15));
    bits = _mm256_srli_epi32(bits, 4);
    return _mm256_cvtepi32_ps(value);
#else
    float wide[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      wide[i] = static_cast<float>(bits[i] & 15u);
      bits[i] >>= 4;
    }
    return Vec::loadu(wide);
#endif
  }
};

// Scale and offset of one group; none with 16 bits.
struct Factors {
  Register scale[kTileVecs], offset[kTileVecs];
  bool is_half;

  Factors(const uint8_t* group, const QuantizedShape& shape, const GroupBytes& bytes)
      : is_half(shape.has_half_factors) {
    if (bytes.factor == 0) return;
    for (int v = 0; v < kTileVecs; ++v) {
      scale[v] = load_factor(group, shape.has_half_factors, v);
      offset[v] = shape.has_offset ? load_factor(group + bytes.factor, shape.has_half_factors, v)
                                   : Vec(0.f);
    }
  }

  Vec apply(const Vec& value, int v) const {
    return at::vec::fmadd(value, Vec(scale[v]), Vec(offset[v]));
  }
};

// Calls f(input, weights) for inputs [0, count) of one group's values, in order; weights are
// kTileVecs registers. `values` starts at a word.
template <int Bits, typename F>
inline void for_each_input(const uint8_t* values, int64_t count, const Factors& factors,
                           const F& f) {
  Register weights[kTileVecs];
  if constexpr (Bits == 16) {
    // NOTE: the choice is made in the loop. Two loops would be two calls of f, and no longer inlined.
    for (int64_t k = 0; k < count; ++k, values += kTileCols * 2) {
      __builtin_prefetch(values + kBytesAhead);
      for (int v = 0; v < kTileVecs; ++v) {
        const uint8_t* from = values + v * kLanes * 2;
        weights[v] = factors.is_half ? widen_float16(from) : widen_bfloat16(from);
      }
      f(k, weights);
    }
  } else if constexpr (Bits == 8) {
    for (int64_t k = 0; k < count; ++k, values += kTileCols) {
      __builtin_prefetch(values + kBytesAhead);
      for (int v = 0; v < kTileVecs; ++v)
        weights[v] = factors.apply(widen_bytes(values + v * kLanes), v);
      f(k, weights);
    }
  } else {
    for (int64_t k = 0; k < count; k += kWordInputs, values += kTileCols * 4) {
      Words words[kTileVecs];
      for (int v = 0; v < kTileVecs; ++v)
        __builtin_prefetch(values + kBytesAhead + v * kLanes * 4);
      for (int v = 0; v < kTileVecs; ++v) words[v] = Words::load(values + v * kLanes * 4);
      // NOTE: a loop. Unrolled, the compiler keeps more in registers than there are.
      for (int64_t end = std::min(count, k + kWordInputs), i = k; i < end; ++i) {
        for (int v = 0; v < kTileVecs; ++v) weights[v] = factors.apply(words[v].pop(), v);
        f(i, weights);
      }
    }
  }
}

}  // namespace pdserve
