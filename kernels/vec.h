// Vectors of 16 as the compiler's own extension: one source for every instruction set.
//
// Everything is in an unnamed namespace, and no standard template is used, because each file that
// includes this is compiled for one instruction set: a function merged across files by the linker
// would run instructions that the machine may not have.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using bf16 = uint16_t;
typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef int16_t v16s __attribute__((vector_size(32)));
typedef uint8_t v16b __attribute__((vector_size(16)));

template <typename V>
inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V>
inline void store(void* to, V v) {
  memcpy(to, &v, sizeof(V));
}

inline v16f loadf(const float* from) { return load<v16f>(from); }
inline v16f splat(float x) { return v16f{} + x; }
inline v16f maximum(v16f a, v16f b) { return a > b ? a : b; }

inline float hmax(v16f v) {
  float best = v[0];
  for (int i = 1; i < 16; i++) best = v[i] > best ? v[i] : best;
  return best;
}

inline float hsum(v16f v) {
  float s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
}

// The even and the odd half of 16 pairs of bf16.
inline v16f even_of(v16u pairs) { return (v16f)(pairs << 16); }
inline v16f odd_of(v16u pairs) { return (v16f)(pairs & 0xffff0000u); }

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t{x} << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline v16h round_bf16(v16f x) {
#if defined(__AVX512BF16__)
  return (v16h)_mm512_cvtneps_pbh((__m512)x);
#else
  v16u bits = (v16u)x;
  v16u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // A NaN stays one.
  v16u is_nan = (v16u)(x != x);
  return __builtin_convertvector(rounded | (is_nan & 0x7fc0u), v16h);
#endif
}

inline void store_bf16(bf16* to, v16f low, v16f high) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  store(to, round_bf16(low));
  store(to + 16, round_bf16(high));
#endif
}

inline v16f from_fp16(const void* from) {
#if defined(__AVX512F__)
  return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  v16u h = __builtin_convertvector(load<v16h>(from), v16u);
  v16f magnitude = (v16f)((h & 0x7fffu) << 13) * 0x1p112f;
  return (v16f)((v16u)magnitude | ((h & 0x8000u) << 16));
#endif
}

// Within 2 units of the last place; what is below exp(-87) becomes 0 or nearly so.
inline v16f exp_(v16f x) {
  x = maximum(x, splat(-87.0f));
  v16f n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  v16f f = x - n * 0.693359375f + n * 2.12194440e-4f;
  v16f p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  v16i exponent = (__builtin_convertvector(n, v16i) + 127) << 23;
  return p * (v16f)exponent;
}

}  // namespace
