// Operations on single tokens: norms, rotary positions, keys and values. Compiled once per
// instruction set.

#pragma once

#include "block_sums.h"
#include "ops.h"
#include "vec.h"

namespace {

using namespace headway;

inline float norm_factor(const float* x, float eps, int size) {
  v16f sum = {};
  for (int i = 0; i < size; i += 16) sum += loadf(x + i) * loadf(x + i);
  return 1.0f / __builtin_sqrtf(hsum(sum) / float(size) + eps);
}

void norm(const float* x, const float* weight, float eps, int size, bf16* out) {
  const float factor = norm_factor(x, eps, size);
  for (int i = 0; i < size; i += 32) {
    store_bf16(out + i, loadf(x + i) * factor * loadf(weight + i),
               loadf(x + i + 16) * factor * loadf(weight + i + 16));
  }
}

void norm_rotate(float* x, const float* weight, float eps, const float* cosines, const float* sines,
                 int head_dim) {
  if (weight) {
    const float factor = norm_factor(x, eps, head_dim);
    for (int i = 0; i < head_dim; i += 16) {
      store(x + i, loadf(x + i) * factor * loadf(weight + i));
    }
  }
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const v16f a = loadf(x + i), b = loadf(x + i + half);
    const v16f c = loadf(cosines + i), s = loadf(sines + i);
    store(x + i, a * c - b * s);
    store(x + i + half, b * c + a * s);
  }
}

void to_bf16(const float* x, int size, bf16* out) {
  for (int i = 0; i < size; i += 32) store_bf16(out + i, loadf(x + i), loadf(x + i + 16));
}

inline float largest(const float* x, int size) {
  v16f top = {};
  for (int i = 0; i < size; i += 16) {
    const v16f v = loadf(x + i);
    top = maximum(top, v < 0.0f ? -v : v);
  }
  return hmax(top);
}

// Quantizes to -127 ... 127 in `to`; returns the scale.
inline float quantize(const float* x, int size, int8_t* to) {
  const float top = largest(x, size);
  const float factor = top > 0.0f ? 127.0f / top : 0.0f;
  v16f check = {};
  for (int i = 0; i < size; i += 16) {
    check += loadf(x + i) * 0.0f;
    v16f scaled = loadf(x + i) * factor;
    v16f rounded = (scaled + 12582912.0f) - 12582912.0f;
    v16i whole = __builtin_convertvector(rounded, v16i);
    for (int j = 0; j < 16; j++) to[i + j] = int8_t(whole[j]);
  }
  // The scale is NaN if a number is not finite, because int8 has no NaN.
  return top / 127.0f + hsum(check);
}

inline void add_to_sums(const void* data, int num_bytes, uint64_t* sums) {
  constexpr int LANES = NUM_SUMS / 2;
  for (int at = 0; at < num_bytes; at += 64) {
    uint64_t words[LANES] = {};
    memcpy(words, (const uint8_t*)data + at, num_bytes - at < 64 ? num_bytes - at : 64);
    for (int lane = 0; lane < LANES; lane++) {
      sums[lane] += words[lane];
      sums[lane + LANES] += sums[lane];
    }
  }
}

void write_kv(const float* key, const float* value, int offset, int head_dim, int format,
              uint8_t* key_tile, uint8_t* value_tile, uint64_t* sums) {
  if (format == HW_INT8) {
    int8_t keys[512], values[512];
    const float scales[] = {quantize(key, head_dim, keys), quantize(value, head_dim, values)};
    int8_t* key_to = (int8_t*)key_tile;
    int8_t* value_to = (int8_t*)value_tile;
    for (int d = 0; d < head_dim; d++) {
      key_to[d / 2 * 32 + offset * 2 + d % 2] = keys[d];
      value_to[offset / 2 * head_dim * 2 + d * 2 + offset % 2] = values[d];
    }
    memcpy(key_tile + TILE * head_dim + offset * 4, &scales[0], 4);
    memcpy(value_tile + TILE * head_dim + offset * 4, &scales[1], 4);
    add_to_sums(keys, head_dim, sums);
    add_to_sums(values, head_dim, sums);
    add_to_sums(scales, sizeof scales, sums);
    return;
  }
  alignas(64) bf16 keys[512], values[512];
  to_bf16(key, head_dim, keys);
  to_bf16(value, head_dim, values);
  for (int d = 0; d < head_dim; d += 2) memcpy(key_tile + d * 32 + offset * 4, keys + d, 4);
  bf16* value_to = (bf16*)value_tile + offset / 2 * head_dim * 2 + offset % 2;
  for (int d = 0; d < head_dim; d++) value_to[d * 2] = values[d];
  add_to_sums(keys, head_dim * 2, sums);
  add_to_sums(values, head_dim * 2, sums);
}

void sum_kv(const uint8_t* key_tile, const uint8_t* value_tile, int offset, int head_dim,
            int format, uint64_t* sums) {
  if (format == HW_INT8) {
    int8_t keys[512], values[512];
    float scales[2];
    for (int d = 0; d < head_dim; d++) {
      keys[d] = (int8_t)key_tile[d / 2 * 32 + offset * 2 + d % 2];
      values[d] = (int8_t)value_tile[offset / 2 * head_dim * 2 + d * 2 + offset % 2];
    }
    memcpy(&scales[0], key_tile + TILE * head_dim + offset * 4, 4);
    memcpy(&scales[1], value_tile + TILE * head_dim + offset * 4, 4);
    add_to_sums(keys, head_dim, sums);
    add_to_sums(values, head_dim, sums);
    add_to_sums(scales, sizeof scales, sums);
    return;
  }
  alignas(64) bf16 keys[512], values[512];
  for (int d = 0; d < head_dim; d += 2) memcpy(keys + d, key_tile + d * 32 + offset * 4, 4);
  const bf16* from = (const bf16*)value_tile + offset / 2 * head_dim * 2 + offset % 2;
  for (int d = 0; d < head_dim; d++) values[d] = from[d * 2];
  add_to_sums(keys, head_dim * 2, sums);
  add_to_sums(values, head_dim * 2, sums);
}

void clear_values(int from, int head_dim, uint8_t* value_tile) {
  bf16* values = (bf16*)value_tile;
  for (int offset = from; offset < TILE; offset++) {
    bf16* to = values + offset / 2 * head_dim * 2 + offset % 2;
    for (int d = 0; d < head_dim; d++) to[d * 2] = 0;
  }
}

}  // namespace
