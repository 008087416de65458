// Vectors of 16 by compiler extension: one source for every instruction set.
//
// Everything is in an unnamed namespace, and no standard template is used, because each file that
// includes this header is compiled for one instruction set. A function that the linker merges
// across files could use instructions that the machine lacks.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using bf16 = uint16_t;
typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef uint16_t v32h __attribute__((vector_size(64)));

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

// Lanes without their bit become -infinity.
inline v16f keep_lanes(v16f x, uint32_t bits) {
  constexpr v16u BIT = {1u << 0,  1u << 1,  1u << 2,  1u << 3, 1u << 4,  1u << 5,
                        1u << 6,  1u << 7,  1u << 8,  1u << 9, 1u << 10, 1u << 11,
                        1u << 12, 1u << 13, 1u << 14, 1u << 15};
  return ((v16u{} + bits) & BIT) != 0u ? x : splat(-__builtin_inff());
}

typedef float v8f __attribute__((vector_size(32)));
typedef float v4f __attribute__((vector_size(16)));

// By halves, so that every instruction set adds in the same order.
inline float hsum(v16f v) {
  const v8f a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const v4f b =
      __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

inline float hmax(v16f v) {
  const v8f a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const v8f b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const v8f c = a > b ? a : b;
  const v4f d = __builtin_shufflevector(c, c, 0, 1, 2, 3),
            e = __builtin_shufflevector(c, c, 4, 5, 6, 7);
  const v4f f = d > e ? d : e;
  const float x = f[0] > f[1] ? f[0] : f[1], y = f[2] > f[3] ? f[2] : f[3];
  return x > y ? x : y;
}

#if defined(__AVX2__)
inline v16i join(__m256i low, __m256i high) {
  v16i v;
  memcpy(&v, &low, 32);
  memcpy((char*)&v + 32, &high, 32);
  return v;
}
#endif

// Shuffles of 16 lanes. Without AVX-512, GCC moves one lane at a time, hence the intrinsics.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m256i half_of(const void* v, int half) {
  __m256i lanes;
  memcpy(&lanes, (const char*)v + 32 * half, 32);
  return lanes;
}

template <int SELECT>
inline v16u pick(v16u first, v16u second) {
  __m256i halves[2];
  for (int i = 0; i < 2; i++) {
    const v16u& v = i == 0 ? first : second;
    const __m256 picked = _mm256_shuffle_ps((__m256)half_of(&v, 0), (__m256)half_of(&v, 1), SELECT);
    halves[i] = _mm256_permute4x64_epi64((__m256i)picked, 0xd8);
  }
  return (v16u)join(halves[0], halves[1]);
}

inline v16u even_lanes(v16u first, v16u second) { return pick<0x88>(first, second); }
inline v16u odd_lanes(v16u first, v16u second) { return pick<0xdd>(first, second); }

inline v16u double_half(v16u v, int half) {
  const __m256i lanes = half_of(&v, half);
  return (v16u)join(_mm256_permutevar8x32_epi32(lanes, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
                    _mm256_permutevar8x32_epi32(lanes, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)));
}
inline v16f double_low(v16f v) { return (v16f)double_half((v16u)v, 0); }
inline v16f double_high(v16f v) { return (v16f)double_half((v16u)v, 1); }

// Lanes 0, 16, 1, 17 and so on.
inline v32h interleave_halves(v32h v) {
  const __m256i a = half_of(&v, 0), b = half_of(&v, 1);
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  return (v32h)join(_mm256_permute2x128_si256(low, high, 0x20),
                    _mm256_permute2x128_si256(low, high, 0x31));
}
#else
inline v16u even_lanes(v16u first, v16u second) {
  return __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                 28, 30);
}
inline v16u odd_lanes(v16u first, v16u second) {
  return __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27,
                                 29, 31);
}

inline v16f double_low(v16f v) {
  return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}
inline v16f double_high(v16f v) {
  return __builtin_shufflevector(v, v, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
}

// Lanes 0, 16, 1, 17 and so on.
inline v32h interleave_halves(v32h v) {
  return __builtin_shufflevector(v, v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8,
                                 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#endif

// Compilers scalarize conversions between widths, hence the intrinsics.
inline v16i widen_i8(const void* from) {
#if defined(__AVX512F__)
  return (v16i)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return join(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
              _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)from + 8))));
#else
  v16i v;
  for (int i = 0; i < 16; i++) v[i] = ((const int8_t*)from)[i];
  return v;
#endif
}

// The lowest four bits of each number.
inline v16f low_nibble(v16u bits) {
#if defined(__AVX512F__)
  const v16f numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (v16f)_mm512_permutexvar_ps((__m512i)bits, (__m512)numbers);
#else
  return __builtin_convertvector((v16i)(bits & 15), v16f);
#endif
}

inline v16h narrow(v16u v) {
#if defined(__AVX512F__)
  return (v16h)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  __m256i low, high;
  memcpy(&low, &v, 32);
  memcpy(&high, (char*)&v + 32, 32);
  // Packing works within 128-bit lanes; the permutation restores the order.
  return (v16h)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
  v16h h;
  for (int i = 0; i < 16; i++) h[i] = uint16_t(v[i]);
  return h;
#endif
}

// The even and the odd half of 16 pairs of bf16.
inline v16f even_of(v16u pairs) { return (v16f)(pairs << 16); }
inline v16f odd_of(v16u pairs) { return (v16f)(pairs & 0xffff0000u); }

// As fp32; `count` is a multiple of 16.
inline void widen_bf16(const bf16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 16) {
#if defined(__AVX512F__)
    const __m256i numbers = _mm256_loadu_si256((const __m256i*)(from + i));
    store(to + i, (v16u)_mm512_cvtepu16_epi32(numbers) << 16);
#elif defined(__AVX2__)
    for (int half = 0; half < 16; half += 8) {
      const __m128i numbers = _mm_loadu_si128((const __m128i*)(from + i + half));
      _mm256_storeu_si256((__m256i*)(to + i + half),
                          _mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
    }
#else
    for (int j = 0; j < 16; j++) {
      const uint32_t bits = uint32_t{from[i + j]} << 16;
      memcpy(to + i + j, &bits, 4);
    }
#endif
  }
}

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
  // NaN stays NaN.
  v16u is_nan = (v16u)(x != x);
  return narrow(rounded | (is_nan & 0x7fc0u));
#endif
}

// Every NaN as the one that rounded_to_bf16 keeps.
inline v16f quiet(v16f x) { return x != x ? splat(__builtin_nanf("")) : x; }

// The nearest bf16 as fp32. `x` is quiet.
inline v16f rounded_to_bf16(v16f x) {
  const v16u bits = (v16u)x;
  return (v16f)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
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
#elif defined(__AVX2__)
  const __m128i* halves = (const __m128i*)from;
  return (v16f)join((__m256i)_mm256_cvtph_ps(_mm_loadu_si128(halves)),
                    (__m256i)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
#else
  v16u h;
  for (int i = 0; i < 16; i++) h[i] = load<v16h>(from)[i];
  v16f magnitude = (v16f)((h & 0x7fffu) << 13) * 0x1p112f;
  const v16u is_special = (v16u)((h & 0x7c00u) == 0x7c00u);  // infinity or NaN
  return (v16f)((v16u)magnitude | (is_special & 0x7f800000u) | ((h & 0x8000u) << 16));
#endif
}

// Sums of products of unsigned bytes with signed ones, for one row and as many outputs as a
// register has lanes. VNNI adds four products to a number of 32 bits. Without it AVX adds two to a
// number of 16 bits, which holds those of a group of 32 inputs with 4-bit weights: at most 32 * 15
// * 127 / 2. The two halves of a byte are such weights.
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef v8f vf;
typedef int32_t vi __attribute__((vector_size(32)));
#else
typedef v16f vf;
typedef v16i vi;
#endif
constexpr int LANES = sizeof(vf) / sizeof(float);

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#if defined(__AVX512BW__)
using Bytes = __m512i;

inline Bytes load_bytes(const uint8_t* from) { return _mm512_load_si512(from); }
inline Bytes low_halves(Bytes bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }
inline Bytes add_pairs(Bytes sums, Bytes bytes, int32_t values) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(bytes, _mm512_set1_epi32(values)));
}
inline vi widen_pairs(Bytes sums) { return (vi)_mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
#else
using Bytes = __m256i;

inline Bytes load_bytes(const uint8_t* from) { return _mm256_load_si256((const __m256i*)from); }
inline Bytes low_halves(Bytes bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline Bytes high_halves(Bytes bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }
inline Bytes add_pairs(Bytes sums, Bytes bytes, int32_t values) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(values)));
}
inline vi widen_pairs(Bytes sums) { return (vi)_mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif

template <bool IS_INT4>
struct ByteWeights {
  Bytes low, high;

  explicit ByteWeights(const uint8_t* from) : low(load_bytes(from)), high(low) {
    if (IS_INT4) return;
    high = high_halves(low);
    low = low_halves(low);
  }
};

template <bool IS_INT4>
struct ByteSums {
  Bytes low{}, high{};

  void add(const ByteWeights<IS_INT4>& weights, int32_t values) {
    low = add_pairs(low, weights.low, values);
    asm("" : "+v"(low));  // in this order: GCC would keep all products and add them in pairs
    if (IS_INT4) return;
    high = add_pairs(high, weights.high, values);
    asm("" : "+v"(high));
  }

  vi total() const {
    return IS_INT4 ? widen_pairs(low) : widen_pairs(low) + widen_pairs(high) * 16;
  }
};
#else
template <bool IS_INT4>
struct ByteWeights {
  v16u bytes;

  explicit ByteWeights(const uint8_t* from) : bytes(load<v16u>(from)) {}
};

template <bool IS_INT4>
struct ByteSums {
  vi sums{};

#if !defined(__AVX512VNNI__)
  __attribute__((noinline))  // 100 instructions for what is one with VNNI
#endif
  void add(const ByteWeights<IS_INT4>& weights, int32_t values) {
#if defined(__AVX512VNNI__)
    sums =
        (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights.bytes, _mm512_set1_epi32(values));
#else
    for (int i = 0; i < 4; i++) {
      sums += (vi)((weights.bytes >> (8 * i)) & 255u) * int32_t{int8_t(values >> (8 * i))};
    }
#endif
  }

  vi total() const { return sums; }
};
#endif

// Stores 32 whole numbers as int8; with `is_split` the even ones of each eight come first.
inline void store_i8(int8_t* to, v16f low, v16f high, bool is_split) {
  const v16i a = __builtin_convertvector(low, v16i), b = __builtin_convertvector(high, v16i);
#if defined(__AVX512F__)
  __m256i bytes =
      _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)b), _mm512_cvtepi32_epi8((__m512i)a));
  if (is_split) {
    const __m256i order = _mm256_set1_epi64x(0x0705030106040200) |
                          _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0);
    bytes = _mm256_shuffle_epi8(bytes, order);
  }
  _mm256_storeu_si256((__m256i*)to, bytes);
#else
  for (int i = 0; i < 32; i++) {
    const int at = is_split ? i / 8 * 8 + i % 2 * 4 + i % 8 / 2 : i;
    to[at] = int8_t(i < 16 ? a[i] : b[i - 16]);
  }
#endif
}

// Error within 3 ulp from 2^-126 to 2^127, clamped beyond. NaN stays NaN.
inline v16f exp2_(v16f x) {
  x = x < -126.0f ? splat(-126.0f) : x;
  x = x > 127.0f ? splat(127.0f) : x;
  const v16f whole = (x + 12582912.0f) - 12582912.0f;
  const v16f f = x - whole;
  v16f p = splat(1.3264776e-3f);
  p = p * f + 9.6715139e-3f;
  p = p * f + 5.5507336e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314700e-1f;
  p = p * f + 1.0f;
  return p * (v16f)((__builtin_convertvector(whole, v16i) + 127) << 23);
}

// Error within 2 ulp. A division would take longer than the rest of a SiLU.
inline v16f reciprocal(v16f x) {
#if defined(__AVX512F__)
  const v16f guess = (v16f)_mm512_rcp14_ps((__m512)x);
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

inline v16f exp_(v16f x) { return exp2_(x * 1.44269504f); }

}  // namespace
