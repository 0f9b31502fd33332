// Sums of products of integers: the part of a product that needs no floats.
//
// 32 bits of weights, and as many of inputs, are a step: two int16 each, or four, uint8 of at most
// 15 times int8.
#pragma once

#include "vec.h"

#include <cstring>

namespace pdserve {

#if defined(CPU_CAPABILITY_AVX512)
using Ints = __m512i;

inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline void store_ints(const Ints& ints, void* to) { _mm512_storeu_si512(to, ints); }
inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints broadcast(int32_t value) { return _mm512_set1_epi32(value); }
inline Vec to_floats(const Ints& ints) { return _mm512_cvtepi32_ps(ints); }
template <int Shift>
Ints shifted(const Ints& ints) {
  return _mm512_srli_epi32(ints, Shift);
}
inline Ints both(const Ints& a, const Ints& b) { return _mm512_and_si512(a, b); }
inline Ints add_pairs(const Ints& sums, const Ints& weights, const Ints& inputs) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, weights, inputs);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(weights, inputs));
#endif
}
inline Ints add_quads(const Ints& sums, const Ints& weights, const Ints& inputs) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, weights, inputs);
#else
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, inputs));
#endif
}
inline Ints sum_of_quads(const Ints& sums) {
#if defined(__AVX512VNNI__)
  return sums;
#else
  return _mm512_madd_epi16(sums, _mm512_set1_epi16(1));
#endif
}
inline Ints byte_pairs(const uint8_t* first, const uint8_t* second) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}
#elif defined(CPU_CAPABILITY_AVX2)
using Ints = __m256i;

inline Ints load_ints(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline void store_ints(const Ints& ints, void* to) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), ints);
}
inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Ints broadcast(int32_t value) { return _mm256_set1_epi32(value); }
inline Vec to_floats(const Ints& ints) { return _mm256_cvtepi32_ps(ints); }
template <int Shift>
Ints shifted(const Ints& ints) {
  return _mm256_srli_epi32(ints, Shift);
}
inline Ints both(const Ints& a, const Ints& b) { return _mm256_and_si256(a, b); }
// NOTE: in assembly, for the compiler loads the inputs of all rows first, and has no registers left
// for sums then.
inline Ints add_pairs(Ints sums, const Ints& weights, const Ints& inputs) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, weights, inputs);
#else
  Ints products;
  asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
               : "+x"(sums), "=&x"(products)
               : "x"(weights), "x"(inputs));
  return sums;
#endif
}
// NOTE: sums are int16, two for each int32, until sum_of_quads.
inline Ints add_quads(Ints sums, const Ints& weights, const Ints& inputs) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, weights, inputs);
#else
  Ints products;
  asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
               : "+x"(sums), "=&x"(products)
               : "x"(weights), "x"(inputs));
  return sums;
#endif
}
inline Ints sum_of_quads(const Ints& sums) {
#if defined(__AVXVNNI__)
  return sums;
#else
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}
inline Ints byte_pairs(const uint8_t* first, const uint8_t* second) {
  const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(first));
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second));
  return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
}
#elif defined(__aarch64__)
static_assert(kLanes == 4);
using Ints = int32x4_t;

inline Ints load_ints(const void* from) { return vld1q_s32(static_cast<const int32_t*>(from)); }
inline void store_ints(const Ints& ints, void* to) { vst1q_s32(static_cast<int32_t*>(to), ints); }
inline Ints zero_ints() { return vdupq_n_s32(0); }
inline Ints broadcast(int32_t value) { return vdupq_n_s32(value); }
inline Vec to_floats(const Ints& ints) { return vcvtq_f32_s32(ints); }
template <int Shift>
Ints shifted(const Ints& ints) {
  if constexpr (Shift == 0) return ints;
  return vreinterpretq_s32_u32(
      vshrq_n_u32(vreinterpretq_u32_s32(ints), Shift == 0 ? 1 : Shift));
}
inline Ints both(const Ints& a, const Ints& b) { return vandq_s32(a, b); }
inline Ints add_pairs(const Ints& sums, const Ints& weights, const Ints& inputs) {
  const int16x8_t a = vreinterpretq_s16_s32(weights), b = vreinterpretq_s16_s32(inputs);
  const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
  return vaddq_s32(sums, vpaddq_s32(low, vmull_high_s16(a, b)));
}
inline Ints add_quads(const Ints& sums, const Ints& weights, const Ints& inputs) {
  const int8x16_t a = vreinterpretq_s8_s32(weights), b = vreinterpretq_s8_s32(inputs);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, a, b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
  return vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(a, b)));
#endif
}
inline Ints sum_of_quads(const Ints& sums) { return sums; }
inline Ints byte_pairs(const uint8_t* first, const uint8_t* second) {
  int32_t a, b;
  std::memcpy(&a, first, sizeof(a));
  std::memcpy(&b, second, sizeof(b));
  const int8x8_t pairs =
      vzip1_s8(vreinterpret_s8_s32(vdup_n_s32(a)), vreinterpret_s8_s32(vdup_n_s32(b)));
  return vreinterpretq_s32_s16(vmovl_s8(pairs));
}
#else
struct Ints {
  int32_t lanes[kLanes];
};

inline Ints load_ints(const void* from) {
  Ints ints;
  std::memcpy(&ints, from, sizeof(ints));
  return ints;
}
inline void store_ints(const Ints& ints, void* to) { std::memcpy(to, &ints, sizeof(ints)); }
inline Ints zero_ints() { return {}; }
inline Ints broadcast(int32_t value) {
  Ints ints;
  for (int32_t& lane : ints.lanes) lane = value;
  return ints;
}
inline Vec to_floats(const Ints& ints) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(ints.lanes[i]);
  return Vec::loadu(wide);
}
template <int Shift>
Ints shifted(Ints ints) {
  for (int32_t& lane : ints.lanes)
    lane = static_cast<int32_t>(static_cast<uint32_t>(lane) >> Shift);
  return ints;
}
inline Ints both(Ints a, const Ints& b) {
  for (int i = 0; i < kLanes; ++i) a.lanes[i] &= b.lanes[i];
  return a;
}
template <typename Value>
void add_products(Ints& sums, const Ints& weights, const Ints& inputs) {
  constexpr int kCount = 4 / sizeof(Value);
  Value a[kLanes * kCount], b[kLanes * kCount];
  std::memcpy(a, &weights, sizeof(a));
  std::memcpy(b, &inputs, sizeof(b));
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kCount; ++j) sums.lanes[i] += a[i * kCount + j] * b[i * kCount + j];
}
inline Ints add_pairs(Ints sums, const Ints& weights, const Ints& inputs) {
  add_products<int16_t>(sums, weights, inputs);
  return sums;
}
inline Ints add_quads(Ints sums, const Ints& weights, const Ints& inputs) {
  add_products<int8_t>(sums, weights, inputs);
  return sums;
}
inline Ints sum_of_quads(const Ints& sums) { return sums; }
inline Ints byte_pairs(const uint8_t* first, const uint8_t* second) {
  int16_t pairs[2 * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    pairs[2 * i] = static_cast<int8_t>(first[i]);
    pairs[2 * i + 1] = static_cast<int8_t>(second[i]);
  }
  return load_ints(pairs);
}
#endif

}  // namespace pdserve
