// Passes over one row of logits, for sampling. Compiled once per instruction set.
//
// Probs are not normalized: exp((logit - best) / temperature) in fp64, the softmax before its
// division. The prob of the best logit is exactly 1. A row is divided into chunks of 64 logits;
// vocabularies are multiples of 16.

#pragma once

#include "ops.h"
#include "vec.h"

namespace {

using namespace headway;

typedef double v8d __attribute__((vector_size(64)));
typedef double v4d __attribute__((vector_size(32)));
typedef double v2d __attribute__((vector_size(16)));
typedef uint64_t v8u __attribute__((vector_size(64)));

inline v8d widen_f32(const float* from) {
#if defined(__AVX512F__)
  return (v8d)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
  const __m256d low = _mm256_cvtps_pd(_mm_loadu_ps(from));
  const __m256d high = _mm256_cvtps_pd(_mm_loadu_ps(from + 4));
  v8d v;
  memcpy(&v, &low, 32);
  memcpy((char*)&v + 32, &high, 32);
  return v;
#else
  v8d v;
  for (int i = 0; i < 8; i++) v[i] = from[i];
  return v;
#endif
}

// Relative error within 2e-12 from 2^-1000 to 1, exact for 0; about 0 below.
inline v8d exp2_f64(v8d x) {
#if defined(__AVX512F__)
  const v8d whole = (v8d)_mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT);
  const v8d f = x - whole;
#else
  constexpr double SHIFT = 0x1.8p52;  // the sum has the nearest integer in its lowest bits
  const v8d y = x < -1000.0 ? v8d{} - 1000.0 : x;
  const v8d shifted = y + SHIFT;
  const v8d f = y - (shifted - SHIFT);
#endif
  v8d p = v8d{} + 1.325497460306718e-06;
  p = p * f + 1.531007807039615e-05;
  p = p * f + 1.5403457039410448e-04;
  p = p * f + 1.3333450573018062e-03;
  p = p * f + 9.618129157656703e-03;
  p = p * f + 5.5504109412010456e-02;
  p = p * f + 0.24022650695821055;
  p = p * f + 0.6931471805459343;
  p = p * f + 1.0;
#if defined(__AVX512F__)
  // 0 for -infinity: the part is NaN then, and scaled by 2^-infinity NaN becomes 0.
  return (v8d)_mm512_scalef_pd((__m512d)p, (__m512d)whole);
#else
  const v8d scale = (v8d)(((v8u)shifted + 1023) << 52);
  return x < -1000.0 ? v8d{} : p * scale;
#endif
}

inline double hsum(v8d v) {
  const v4d a =
      __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  const v2d b = __builtin_shufflevector(a, a, 0, 1) + __builtin_shufflevector(a, a, 2, 3);
  return b[0] + b[1];
}

inline v8d prob(const float* logits, double best, double factor) {
  return exp2_f64((widen_f32(logits) - best) * factor);
}

inline v8d maximum(v8d a, v8d b) { return a > b ? a : b; }

inline double hmax(v8d v) {
  const v4d a = __builtin_shufflevector(v, v, 0, 1, 2, 3);
  const v4d b = __builtin_shufflevector(v, v, 4, 5, 6, 7);
  const v4d c = a > b ? a : b;
  const v2d d = __builtin_shufflevector(c, c, 0, 1), e = __builtin_shufflevector(c, c, 2, 3);
  const v2d f = d > e ? d : e;
  return f[0] > f[1] ? f[0] : f[1];
}

inline int end_of(int chunk, int size) {
  return size < (chunk + 1) * CHUNK ? size : (chunk + 1) * CHUNK;
}

double softmax_row(const float* logits, int size, double best, double factor, const Probs& out) {
  double total = 0.0;
  for (int chunk = 0; chunk * CHUNK < size; chunk++) {
    v8d sum = {}, top = {};
    for (int i = chunk * CHUNK; i < end_of(chunk, size); i += 16) {
      const v8d a = prob(logits + i, best, factor), b = prob(logits + i + 8, best, factor);
      store(out.probs + i, a);
      store(out.probs + i + 8, b);
      sum += a + b;
      top = maximum(top, maximum(a, b));
    }
    out.tops[chunk] = hmax(top);
    total += out.sums[chunk] = hsum(sum);
  }
  return total;
}

// Bit i is set if number i is at least `bound`.
inline uint32_t mask_at_least(const double* from, double bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask(_mm512_loadu_pd(from), _mm512_set1_pd(bound), _CMP_GE_OQ);
#elif defined(__AVX2__)
  const __m256d b = _mm256_set1_pd(bound);
  const int low = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(from), b, _CMP_GE_OQ));
  const int high = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(from + 4), b, _CMP_GE_OQ));
  return uint32_t(low) | uint32_t(high) << 4;
#else
  uint32_t mask = 0;
  for (int i = 0; i < 8; i++) mask |= uint32_t(from[i] >= bound) << i;
  return mask;
#endif
}

void sum_at_least(const Probs& row, int size, const double* bounds, Share* shares) {
  v8d sums[NUM_BOUNDS] = {};
  v8u counts[NUM_BOUNDS] = {};
  for (int chunk = 0; chunk * CHUNK < size; chunk++) {
    if (row.tops[chunk] < bounds[0]) continue;
    for (int i = chunk * CHUNK; i < end_of(chunk, size); i += 8) {
      const v8d w = load<v8d>(row.probs + i);
      for (int b = 0; b < NUM_BOUNDS; b++) {
#if defined(__AVX512F__)
        const __mmask8 mask = _mm512_cmp_pd_mask((__m512d)w, _mm512_set1_pd(bounds[b]), _CMP_GE_OQ);
        sums[b] = (v8d)_mm512_mask_add_pd((__m512d)sums[b], mask, (__m512d)sums[b], (__m512d)w);
        counts[b] = (v8u)_mm512_mask_add_epi64((__m512i)counts[b], mask, (__m512i)counts[b],
                                               _mm512_set1_epi64(1));
#else
        const v8u is_kept = (v8u)(w >= bounds[b]);
        sums[b] += (v8d)((v8u)w & is_kept);
        counts[b] -= is_kept;
#endif
      }
    }
  }
  for (int b = 0; b < NUM_BOUNDS; b++) {
    shares[b] = {0, hsum(sums[b])};
    for (int i = 0; i < 8; i++) shares[b].count += counts[b][i];
  }
}

double sum_chunks_above(const Probs& row, int size, double bound, double* sums, int32_t* equal_ids,
                        int* num_equal) {
  double total = 0.0;
  int count = 0;
  for (int chunk = 0; chunk * CHUNK < size; chunk++) {
    v8d sum = {};
    if (row.tops[chunk] >= bound) {
      for (int i = chunk * CHUNK; i < end_of(chunk, size); i += 8) {
        const v8d w = load<v8d>(row.probs + i);
#if defined(__AVX512F__)
        const __m512d v = (__m512d)w, b = _mm512_set1_pd(bound);
        sum = (v8d)_mm512_mask_add_pd((__m512d)sum, _mm512_cmp_pd_mask(v, b, _CMP_GT_OQ),
                                      (__m512d)sum, v);
        uint32_t mask = _mm512_cmp_pd_mask(v, b, _CMP_EQ_OQ);
#else
        sum += (v8d)((v8u)w & (v8u)(w > bound));
        uint32_t mask = 0;
        for (int j = 0; j < 8; j++) mask |= uint32_t(w[j] == bound) << j;
#endif
        for (; mask; mask &= mask - 1) equal_ids[count++] = i + __builtin_ctz(mask);
      }
    }
    total += sums[chunk] = hsum(sum);
  }
  *num_equal = count;
  return total;
}

int copy_between(const Probs& row, int size, double low, double high, double* values) {
  int count = 0;
  for (int chunk = 0; chunk * CHUNK < size; chunk++) {
    if (row.tops[chunk] < low) continue;
    for (int i = chunk * CHUNK; i < end_of(chunk, size); i += 8) {
      const uint32_t mask = mask_at_least(row.probs + i, low) & ~mask_at_least(row.probs + i, high);
#if defined(__AVX512F__)
      const __m512d some = _mm512_maskz_compress_pd(mask, _mm512_loadu_pd(row.probs + i));
      _mm512_storeu_pd(values + count, some);
      count += __builtin_popcount(mask);
#else
      for (uint32_t rest = mask; rest; rest &= rest - 1) {
        values[count++] = row.probs[i + __builtin_ctz(rest)];
      }
#endif
    }
  }
  return count;
}

double sum_exp(const float* logits, int size, float best, float* tops) {
  v8d total = {};
  for (int chunk = 0; chunk * CHUNK < size; chunk++) {
    v16f sum = {}, top = splat(-__builtin_inff());
    for (int i = chunk * CHUNK; i < end_of(chunk, size); i += 16) {
      const v16f x = loadf(logits + i);
      sum += exp_(x - best);
      top = maximum(top, x);
    }
    tops[chunk] = hmax(top);
    float halves[16];
    store(halves, sum);
    total += widen_f32(halves) + widen_f32(halves + 8);
  }
  return hsum(total);
}

int list_at_least(const float* logits, const float* tops, int size, float bound, int32_t* ids) {
  int count = 0;
  for (int chunk = 0; chunk * CHUNK < size; chunk++) {
    if (tops[chunk] < bound) continue;
    for (int i = chunk * CHUNK; i < end_of(chunk, size); i++) {
      if (logits[i] >= bound) ids[count++] = i;
    }
  }
  return count;
}

int count_above(const float* logits, int size, float value) {
  v16i above = {};
  for (int i = 0; i < size; i += 16) above -= loadf(logits + i) > value;
  int count = 0;
  for (int i = 0; i < 16; i++) count += above[i];
  return count;
}

void mask_row(const float* logits, const uint32_t* mask, int size, float* out) {
  for (int i = 0; i < size; i += 16) {
    store(out + i, keep_lanes(loadf(logits + i), mask[i / 32] >> (i % 32)));
  }
}

int find_best(const float* logits, int size) {
  v16f top = loadf(logits);
  v16i first = {};  // where each lane found its maximum
  for (int i = 16; i < size; i += 16) {
    const v16f x = loadf(logits + i);
    first = x > top ? v16i{} + i : first;
    top = maximum(top, x);
  }
  int best = 0, lane = 0;
  for (int i = 0; i < 16; i++) {
    const int at = first[i] + i;
    if (i == 0 || top[i] > top[lane] || (top[i] == top[lane] && at < best)) {
      best = at;
      lane = i;
    }
  }
  return best;
}

}  // namespace
