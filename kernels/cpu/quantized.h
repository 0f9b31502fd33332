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
#include "prefetch.h"
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

  // Value I of each word as a float.
  template <int I>
  Vec get() const {
#if defined(CPU_CAPABILITY_AVX512)
    // A table look-up reads the low 4 bits of each lane only: no mask, no conversion.
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(bits, 4 * I), table);
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i low = I == 0 ? bits : _mm256_srli_epi32(bits, 4 * I);
    return _mm256_cvtepi32_ps(I == 7 ? low : _mm256_and_si256(low, _mm256_set1_epi32(15)));
#else
    float wide[kLanes];
    for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(bits[i] >> (4 * I) & 15u);
    return Vec::loadu(wide);
#endif
  }
};

// Reads one panel, a word after the other, and fetches ahead of what it reads. IsCrowded: whoever
// takes the weights needs nearly all registers.
template <int Bits, bool IsCrowded>
class PanelReader {
 public:
  // skipped_bytes: what lies between this panel and the next that is read.
  PanelReader(const QuantizedShape& shape, const uint8_t* panel, int64_t skipped_bytes = 0)
      : shape_(shape),
        group_(panel),
        skipped_bytes_(skipped_bytes),
        panel_end_(panel + quantized_panel_bytes(shape)) {
    open_group();
  }

  bool has_inputs() const { return left_ > 0; }

  // About where the next bytes are.
  const uint8_t* next() const { return values_; }

  // Calls f(input, weights) for the next inputs, eight but at a group's end, the first of them being
  // input 0; weights are kTileVecs registers. Returns how many.
  template <typename F>
  inline int64_t read_word(const F& f) {
    constexpr int64_t kWordBytes = kWordInputs * kTileCols * Bits / 8;
    const uint8_t* ahead = values_ + kBytesAhead;
    if (ahead >= panel_end_) ahead += skipped_bytes_;
    for (int64_t i = 0; i < kWordBytes; i += kCacheLine) __builtin_prefetch(ahead + i);
    const int64_t count = std::min(kWordInputs, left_);
    for_each_input(count, f);
    values_ += kWordBytes;
    left_ -= count;
    if (left_ == 0) close_group();
    return count;
  }

 private:
  void open_group() {
    const int64_t inputs = std::min(shape_.group_size, shape_.in_features - first_);
    const GroupBytes bytes(shape_, inputs);
    left_ = inputs;
    group_end_ = group_ + bytes.whole;
    values_ = group_end_ - bytes.values;
    if constexpr (Bits < 16)
      for (int v = 0; v < (shape_.has_offset ? 2 : 1) * kTileVecs; ++v)
        load_factor(group_, shape_.has_half_factors, v).store(factors_ + v * kLanes);
  }

  void close_group() {
    first_ += std::min(shape_.group_size, shape_.in_features - first_);
    group_ = group_end_;
    if (first_ < shape_.in_features) open_group();
  }

  // NOTE: makes the compiler read memory at each use. It would keep the values in registers, and so
  // push sums out of them.
  template <typename T>
  static T* reread(T* from) {
    if constexpr (IsCrowded) asm volatile("" : "+r"(from));
    return from;
  }

  static Vec apply(const float* factors, int v, const Vec& value) {
    const float* scale = factors + v * kLanes;
    return at::vec::fmadd(value, Vec::loadu(scale), Vec::loadu(scale + kTileCols));
  }

  template <typename F>
  inline void for_each_input(int64_t count, const F& f) const {
    const uint8_t* values = values_;
    Register weights[kTileVecs];
    if constexpr (Bits == 16) {
      // NOTE: the choice is made in the loop. Two loops would be two calls of f, and no longer
      // inlined.
      for (int64_t k = 0; k < count; ++k, values += kTileCols * 2) {
        for (int v = 0; v < kTileVecs; ++v) {
          const uint8_t* from = values + v * kLanes * 2;
          weights[v] = shape_.has_half_factors ? widen_float16(from) : widen_bfloat16(from);
        }
        f(k, weights);
      }
    } else if constexpr (Bits == 8) {
      for (int64_t k = 0; k < count; ++k, values += kTileCols) {
        const float* factors = reread(factors_);
        for (int v = 0; v < kTileVecs; ++v)
          weights[v] = apply(factors, v, widen_bytes(values + v * kLanes));
        f(k, weights);
      }
    } else {
      c10::ForcedUnroll<kWordInputs>{}([&](auto k) {
        if (k >= count) return;
        const float* factors = reread(factors_);
        const uint8_t* from = reread(values);
        for (int v = 0; v < kTileVecs; ++v) {
          const Words words = Words::load(from + v * kLanes * 4);
          weights[v] = apply(factors, v, words.template get<k>());
        }
        f(k, weights);
      });
    }
  }

  const QuantizedShape shape_;
  const uint8_t* group_;
  const int64_t skipped_bytes_;
  const uint8_t* const panel_end_;
  const uint8_t *values_ = nullptr, *group_end_ = nullptr;
  int64_t first_ = 0;  // input that the group starts with
  int64_t left_ = 0;   // inputs of the group
  alignas(64) float factors_[2 * kTileCols] = {};  // scales, offsets; of no use with 16 bits
};

}  // namespace pdserve
