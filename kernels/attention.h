// Attention on the blocks of the KV store. Compiled once per instruction set.

#pragma once

#include "ops.h"
#include "vec.h"
#if defined(HW_WITH_AMX)
#include "tiles.h"
#endif

namespace {

using namespace headway;

struct Tiles {
  const Attention& a;
  int first;  // tile of 16 positions
  int last;
  int64_t tile_bytes;
  int tiles_per_block;

  const uint8_t* keys(int tile) const {
    const uint8_t* block = a.kv + a.blocks[tile / tiles_per_block] * a.block_bytes;
    return block + a.head_offset + tile % tiles_per_block * tile_bytes;
  }
  const uint8_t* values(int tile) const { return keys(tile) + tiles_per_block * tile_bytes; }
  int64_t num() const { return last - first + 1; }
};

inline int position_of(const Attention& a, int row) {
  return a.start + (a.first_row + row) / a.group_size;
}

// The first position that the query at `position` attends to.
inline int oldest(const Attention& a, int position) {
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}

inline Tiles tiles_of(const Attention& a) {
  // Rows are in token order: the first row sees the oldest position, the last the newest.
  const int first = oldest(a, position_of(a, 0));
  const int last = position_of(a, a.num_rows - 1);
  return {a, first / TILE, last / TILE, kv_tile_bytes(a.kv_format, a.head_dim),
          a.block_size / TILE};
}

inline void store_rounded(bf16* to, v16f x) { store(to, round_bf16(x)); }
inline void store_rounded(float* to, v16f x) { store(to, rounded_to_bf16(quiet(x))); }

// Writes the exponentials of one row of scores, rounded to bf16, to `weights`, which may be
// `scores`; returns their sum. Scores are in powers of 2 and not yet scaled by 1 / sqrt(head_dim).
// With int8 keys and values, a score includes the scale of its key, and a weight the scale of its
// values.
template <typename Weight>
inline float softmax_row(const Attention& a, const Tiles& tiles, int row, float* scores,
                         Weight* weights) {
  constexpr v16i LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float scale = 1.44269504f / __builtin_sqrtf(float(a.head_dim));
  const int position = position_of(a, row), from = oldest(a, position);
  const int num = int(tiles.num());
  const int64_t scales_at = int64_t{TILE} * a.head_dim;
  const bool has_scales = a.kv_format == HW_INT8;
  // Only these tiles have keys to mask.
  const int first_whole = (from + TILE - 1) / TILE - tiles.first;
  const int last_whole = (position + 1) / TILE - 1 - tiles.first;
  v16f top = splat(-__builtin_inff());
  for (int t = 0; t < num; t++) {
    v16f s = loadf(scores + t * TILE);
    const bool is_whole = first_whole <= t && t <= last_whole;
    if (has_scales) s *= load<v16f>(tiles.keys(tiles.first + t) + scales_at);
    if (!is_whole) {
      const v16i keys = LANES + (tiles.first + t) * TILE;
      s = ((keys >= from) & (keys <= position)) ? s : splat(-__builtin_inff());
    }
    if (has_scales || !is_whole) store(scores + t * TILE, s);
    top = maximum(top, s);
  }
  const float best = hmax(top) * scale;
  v16f sum = {};
  for (int t = 0; t < num; t++) {
    const v16f s = loadf(scores + t * TILE);
    v16f e = exp2_(s * scale - best);
    const bool is_whole = first_whole <= t && t <= last_whole;
    if (!is_whole) e = s == -__builtin_inff() ? v16f{} : e;
    sum += e;
    if (has_scales) {
      e *= load<v16f>(tiles.values(tiles.first + t) + scales_at);
      if (!is_whole) e = s == -__builtin_inff() ? v16f{} : e;
    }
    store_rounded(weights + t * TILE, e);
  }
  return hsum(sum);
}

inline void finish_attention(const Attention& a, int row, const float* mixed, float sum) {
  const int at = a.first_row + row;
  bf16* out = a.out + at / a.group_size * a.out_stride + at % a.group_size * a.head_dim;
  const float share = 1.0f / sum;
  for (int d = 0; d < a.head_dim; d += 32) {
    store_bf16(out + d, loadf(mixed + d) * share, loadf(mixed + d + 16) * share);
  }
}

inline void int8_to_bf16(const uint8_t* from, int count, bf16* to) {
  for (int i = 0; i < count; i += 32) {
    const v16i a = widen_i8(from + i), b = widen_i8(from + i + 16);
    store_bf16(to + i, __builtin_convertvector(a, v16f), __builtin_convertvector(b, v16f));
  }
}

struct AttentionScratch {
  float* scores;    // [16][padded]
  bf16* weights;    // [16][padded]
  float* mixed;     // [16][head_dim]
  bf16* converted;  // two tiles
  int64_t padded;

  AttentionScratch(uint8_t* memory, int64_t num_tiles, int head_dim) {
    padded = num_tiles * TILE;
    mixed = (float*)memory;
    converted = (bf16*)(mixed + TILE * head_dim);
    scores = (float*)(converted + 2 * TILE * head_dim);
    weights = (bf16*)(scores + TILE * padded);
  }
};

inline const bf16* as_bf16(const uint8_t* tile, const Attention& a, bf16* converted) {
  if (a.kv_format == HW_BF16) return (const bf16*)tile;
  int8_to_bf16(tile, TILE * a.head_dim, converted);
  return converted;
}

#if defined(HW_WITH_AMX)

// Tiles 0-4: one row per query, 64 bytes each; 5: keys; 6: values; 7: weights.
inline void configure_attention(int num_rows) {
  TileConfig config;
  for (int t = 0; t < 5; t++) {
    config.row_bytes[t] = 64;
    config.rows[t] = num_rows;
  }
  config.row_bytes[5] = 64;
  config.rows[5] = 16;
  config.row_bytes[6] = 64;
  config.rows[6] = 8;
  config.row_bytes[7] = 32;
  config.rows[7] = num_rows;
  load_config(config);
}

inline void score_keys(const Attention& a, const Tiles& tiles, const AttentionScratch& s) {
  const int64_t stride = int64_t{a.head_dim} * 2;
  const int parts = a.head_dim / 32;
  HW_TILE_LOAD(1, a.queries, stride);
  if (parts > 1) HW_TILE_LOAD(2, a.queries + 32, stride);
  if (parts > 2) HW_TILE_LOAD(3, a.queries + 64, stride);
  if (parts > 3) HW_TILE_LOAD(4, a.queries + 96, stride);
  for (int t = tiles.first; t <= tiles.last; t++) {
    const bf16* keys = as_bf16(tiles.keys(t), a, s.converted);
    _tile_zero(0);
    HW_TILE_LOAD(5, keys, 64);
    _tile_dpbf16ps(0, 1, 5);
    if (parts > 1) {
      HW_TILE_LOAD(5, keys + 512, 64);
      _tile_dpbf16ps(0, 2, 5);
    }
    if (parts > 2) {
      HW_TILE_LOAD(5, keys + 1024, 64);
      _tile_dpbf16ps(0, 3, 5);
    }
    if (parts > 3) {
      HW_TILE_LOAD(5, keys + 1536, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, s.scores + (t - tiles.first) * TILE, s.padded * 4);
  }
}

// Up to 64 columns of the values, from column `from` on.
inline void mix_values(const Attention& a, const Tiles& tiles, const AttentionScratch& s,
                       int from) {
  const int parts = (a.head_dim - from) / TILE < 4 ? (a.head_dim - from) / TILE : 4;
  const int64_t stride = int64_t{a.head_dim} * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int t = tiles.first; t <= tiles.last; t++) {
    const bf16* values = as_bf16(tiles.values(t), a, s.converted) + from * 2;
    HW_TILE_LOAD(7, s.weights + (t - tiles.first) * TILE, s.padded * 2);
    HW_TILE_LOAD(6, values, stride);
    _tile_dpbf16ps(0, 7, 6);
    HW_TILE_LOAD(6, values + 32, stride);
    _tile_dpbf16ps(1, 7, 6);
    if (parts > 2) {
      HW_TILE_LOAD(6, values + 64, stride);
      _tile_dpbf16ps(2, 7, 6);
      HW_TILE_LOAD(6, values + 96, stride);
      _tile_dpbf16ps(3, 7, 6);
    }
  }
  float* mixed = s.mixed + from;
  _tile_stored(0, mixed, stride);
  _tile_stored(1, mixed + 16, stride);
  if (parts > 2) {
    _tile_stored(2, mixed + 32, stride);
    _tile_stored(3, mixed + 48, stride);
  }
}

void attend(const Attention& a, uint8_t* memory) {
  const Tiles tiles = tiles_of(a);
  const AttentionScratch s(memory, tiles.num(), a.head_dim);
  configure_attention(a.num_rows);
  score_keys(a, tiles, s);
  float sums[TILE];
  for (int r = 0; r < a.num_rows; r++) {
    sums[r] = softmax_row(a, tiles, r, s.scores + r * s.padded, s.weights + r * s.padded);
  }
  for (int from = 0; from < a.head_dim; from += 64) mix_values(a, tiles, s, from);
  for (int r = 0; r < a.num_rows; r++) finish_attention(a, r, s.mixed + r * a.head_dim, sums[r]);
}

#else

// As many sums as the registers hold: scores of rows with tiles of keys, and mixed values of rows
// in columns of 16.
#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 8, SCORE_TILES = 2, MIX_ROWS = 6, MIX_COLUMNS = 4;
#elif defined(__AVX2__)
constexpr int SCORE_ROWS = 4, SCORE_TILES = 1, MIX_ROWS = 3, MIX_COLUMNS = 2;
#else
constexpr int SCORE_ROWS = 2, SCORE_TILES = 1, MIX_ROWS = 2, MIX_COLUMNS = 1;
#endif

// Scores of R rows with T tiles of keys. `queries` are fp32.
template <int R, int T>
void score_block(const Attention& a, const Tiles& tiles, const AttentionScratch& s, int tile,
                 int row, const float* queries) {
  const bf16* keys[T];
  for (int t = 0; t < T; t++) {
    keys[t] = as_bf16(tiles.keys(tile + t), a, s.converted + t * TILE * a.head_dim);
  }
  v16f sum[R][T] = {};
  for (int d = 0; d < a.head_dim; d += 2) {
#pragma GCC unroll 2
    for (int t = 0; t < T; t++) {
      const v16u pairs = load<v16u>(keys[t] + d * TILE);
      const v16f even = even_of(pairs), odd = odd_of(pairs);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        sum[r][t] += queries[r * MAX_HEAD_DIM + d] * even;
        sum[r][t] += queries[r * MAX_HEAD_DIM + d + 1] * odd;
      }
    }
  }
  for (int r = 0; r < R; r++) {
    float* scores = s.scores + (row + r) * s.padded + (tile - tiles.first) * TILE;
    for (int t = 0; t < T; t++) store(scores + t * TILE, sum[r][t]);
  }
}

template <int R>
inline void score_rows(int num_rows, const Attention& a, const Tiles& tiles,
                       const AttentionScratch& s, int row) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      score_rows<R - 1>(num_rows, a, tiles, s, row);
      return;
    }
  }
  alignas(64) float queries[R * MAX_HEAD_DIM];
  for (int r = 0; r < R; r++) {
    widen_bf16(a.queries + (row + r) * a.head_dim, a.head_dim, queries + r * MAX_HEAD_DIM);
  }
  int tile = tiles.first;
  for (; tile + SCORE_TILES - 1 <= tiles.last; tile += SCORE_TILES) {
    score_block<R, SCORE_TILES>(a, tiles, s, tile, row, queries);
  }
  for (; tile <= tiles.last; tile++) score_block<R, 1>(a, tiles, s, tile, row, queries);
}

// Columns `from` to `from` + 16 * C of the mixed values of R rows.
template <int R, int C>
void mix_block(const Attention& a, const Tiles& tiles, const AttentionScratch& s, int row,
               int from) {
  v16f sum[R][C] = {};
  for (int tile = tiles.first; tile <= tiles.last; tile++) {
    const bf16* values = as_bf16(tiles.values(tile), a, s.converted) + from * 2;
    const float* weights = s.scores + row * s.padded + (tile - tiles.first) * TILE;
    for (int key = 0; key < TILE; key += 2) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const v16u pairs = load<v16u>(values + key * a.head_dim + c * 32);
        const v16f even = even_of(pairs), odd = odd_of(pairs);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          sum[r][c] += weights[r * s.padded + key] * even;
          sum[r][c] += weights[r * s.padded + key + 1] * odd;
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < C; c++) store(s.mixed + (row + r) * a.head_dim + from + c * 16, sum[r][c]);
  }
}

template <int R>
inline void mix_rows(int num_rows, const Attention& a, const Tiles& tiles,
                     const AttentionScratch& s, int row) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      mix_rows<R - 1>(num_rows, a, tiles, s, row);
      return;
    }
  }
  int from = 0;
  for (; from + MIX_COLUMNS * 16 <= a.head_dim; from += MIX_COLUMNS * 16) {
    mix_block<R, MIX_COLUMNS>(a, tiles, s, row, from);
  }
  for (; from < a.head_dim; from += 16) mix_block<R, 1>(a, tiles, s, row, from);
}

void attend(const Attention& a, uint8_t* memory) {
  const Tiles tiles = tiles_of(a);
  const AttentionScratch s(memory, tiles.num(), a.head_dim);
  for (int row = 0; row < a.num_rows; row += SCORE_ROWS) {
    score_rows<SCORE_ROWS>(a.num_rows - row, a, tiles, s, row);
  }
  float sums[TILE];
  for (int r = 0; r < a.num_rows; r++) {
    float* scores = s.scores + r * s.padded;
    sums[r] = softmax_row(a, tiles, r, scores, scores);
  }
  for (int row = 0; row < a.num_rows; row += MIX_ROWS) {
    mix_rows<MIX_ROWS>(a.num_rows - row, a, tiles, s, row);
  }
  for (int r = 0; r < a.num_rows; r++) finish_attention(a, r, s.mixed + r * a.head_dim, sums[r]);
}

#endif

}  // namespace
