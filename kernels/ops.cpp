// The operations for one instruction set; the build compiles this file once for each.

#include "ops.h"

#include "vec.h"

#if defined(HW_WITH_AMX)
#include <immintrin.h>
#endif

namespace {

using namespace headway;

// ---- weights ----

// One group of 32 inputs of a panel as bf16: [16 pairs][16 outputs][2].
inline void dequantize_group(const uint8_t* from, int format, bf16* to) {
  constexpr int P = 32;  // numbers of a pair of inputs
  if (format == HW_BF16) {
    memcpy(to, from, 1024);
    return;
  }
  const v16f scale = from_fp16(from);
  // Output n holds lanes 2n and 2n + 1.
  const v16f low = __builtin_shufflevector(scale, scale, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const v16f high =
      __builtin_shufflevector(scale, scale, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
  if (format == HW_INT8) {
    for (int pair = 0; pair < 16; pair++) {
      const uint8_t* bytes = from + 32 + pair * 32;
      const v16i a = widen_i8(bytes), b = widen_i8(bytes + 16);
      store_bf16(to + pair * P, __builtin_convertvector(a, v16f) * low,
                 __builtin_convertvector(b, v16f) * high);
    }
    return;
  }
  const v16f offset = from_fp16(from + 32);
  const v16f low_offset =
      __builtin_shufflevector(offset, offset, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const v16f high_offset = __builtin_shufflevector(offset, offset, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12,
                                                   13, 13, 14, 14, 15, 15);
  for (int pair = 0; pair < 16; pair++) {
    const v16i bytes = widen_u8(from + 64 + pair * 16);
    v16f a = __builtin_convertvector(bytes & 15, v16f);
    v16f b = __builtin_convertvector(bytes >> 4, v16f);
    store_bf16(to + pair * P, a * low + low_offset, b * high + high_offset);
  }
}

constexpr int64_t PREFETCH_BYTES = 8192;

inline void prefetch(const uint8_t* from, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// Inputs `from` to `to` of a panel as bf16 pairs; bf16 weights are used where they are.
inline const bf16* open_panel(const HwLinear& linear, int panel, int64_t from, int64_t to,
                              bf16* scratch) {
  const uint8_t* data = linear.data + panel * panel_bytes(linear.format, linear.num_inputs);
  const int64_t step = group_bytes(linear.format);
  if (linear.format == HW_BF16) return (const bf16*)(data + from / GROUP * step);
  for (int64_t g = from / GROUP; g < to / GROUP; g++) {
    // By the time this piece has been multiplied, the next one is there.
    prefetch(data + g * step + PANEL_CHUNK / GROUP * step, step);
    dequantize_group(data + g * step, linear.format, scratch + (g * GROUP - from) * TILE);
  }
  return scratch;
}

void embed(const HwLinear& table, int token_id, float* out) {
  const uint8_t* panel =
      table.data + token_id / TILE * panel_bytes(table.format, table.num_inputs);
  const int column = token_id % TILE;
  alignas(64) bf16 group[GROUP * TILE];
  for (int g = 0; g < table.num_inputs / GROUP; g++) {
    dequantize_group(panel + g * group_bytes(table.format), table.format, group);
    for (int k = 0; k < GROUP; k++) {
      out[g * GROUP + k] = to_float(group[k / 2 * 32 + column * 2 + k % 2]);
    }
  }
}

// ---- products ----

// What becomes of one row of an item's sums: columns 32 * item ... + 31.
inline void finish(const Product& p, int item, int row, v16f a, v16f b, bool has_second) {
  const int column = item * 32;
  if (p.linear->bias) {
    a += loadf(p.linear->bias + column);
    if (has_second) b += loadf(p.linear->bias + column + 16);
  }
  switch (p.epilogue) {
    case Epilogue::SiluMul:
      store(p.out_bf16 + row * p.out_stride + item * 16, round_bf16(a / (1.0f + exp_(-a)) * b));
      return;
    case Epilogue::Add: {
      float* out = p.out + row * p.out_stride + column;
      store(out, loadf(out) + a);
      if (has_second) store(out + 16, loadf(out + 16) + b);
      return;
    }
    case Epilogue::Best: {
      float* best = p.best + row * 32;  // 16 maxima, then 16 sums that turn NaN and stay so
      int32_t* ids = p.best_ids + row * 16;
      constexpr v16i LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      v16f top = loadf(best);
      v16i id = load<v16i>(ids);
      v16f check = loadf(best + 16) + a * 0.0f;
      // Of equals the lowest wins, in whatever order a thread comes by them.
      const v16i at = LANES + column;
      const v16i is_better = (a > top) | ((a == top) & (at < id));
      id = is_better ? at : id;
      top = a > top ? a : top;
      if (has_second) {
        check += b * 0.0f;
        const v16i is_better_still = (b > top) | ((b == top) & (at + 16 < id));
        id = is_better_still ? at + 16 : id;
        top = b > top ? b : top;
      }
      store(best, top);
      store(best + 16, check);
      store(ids, id);
      if (!p.out) return;
      [[fallthrough]];
    }
    case Epilogue::Store: {
      float* out = p.out + row * p.out_stride + column;
      store(out, a);
      if (has_second) store(out + 16, b);
      return;
    }
  }
}

#if defined(HW_WITH_AMX)

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Two tiles of rows at most. Accumulators 0-3, inputs 4-5, weights 6-7; odd numbers of the first
// two kinds belong to the second panel and the second tile of rows.
inline void configure_product(int num_rows) {
  TileConfig config;
  const int first = num_rows < TILE ? num_rows : TILE, second = num_rows - first;
  const int rows[8] = {first, first, second, second, first, second, TILE, TILE};
  for (int t = 0; t < 8; t++) {
    config.row_bytes[t] = rows[t] ? 64 : 0;
    config.rows[t] = uint8_t(rows[t]);
  }
  _tile_loadconfig(&config);
}

// Adds to the sums of up to 32 rows with two panels the inputs `from` to `to`, from 0 if those
// are the first. `weights(input)` gives 32 inputs of both panels, as two tiles.
template <bool TWO, typename Weights>
inline void multiply_block(const Product& p, int row, int64_t from, int64_t to, float* sums,
                           const Weights& weights) {
  const int64_t width = p.linear->num_inputs;
  const bf16* inputs = p.inputs + row * width;
  if (from == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 128);
    _tile_loadd(1, sums + 16, 128);
    if (TWO) {
      _tile_loadd(2, sums + 512, 128);
      _tile_loadd(3, sums + 528, 128);
    }
  }
  for (int64_t k = from; k < to; k += GROUP) {
    const bf16* tiles[2];
    weights(k, tiles);
    _tile_loadd(6, tiles[0], 64);
    _tile_loadd(4, inputs + k, width * 2);
    _tile_loadd(7, tiles[1], 64);
    _tile_dpbf16ps(0, 4, 6);
    if (TWO) {
      _tile_loadd(5, inputs + k + width * TILE, width * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (TWO) {
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }
}

template <typename Weights>
inline void multiply_rows(const Product& p, int row, int count, int64_t from, int64_t to,
                          float* sums, const Weights& weights) {
  if (count > TILE) multiply_block<true>(p, row, from, to, sums, weights);
  else multiply_block<false>(p, row, from, to, sums, weights);
}

inline void finish_rows(const Product& p, int item, int row, int count, const float* sums,
                        bool has_second) {
  for (int r = 0; r < count; r++) {
    finish(p, item, row + r, loadf(sums + r * 32), loadf(sums + r * 32 + 16), has_second);
  }
}

// Few rows use a weight once: it goes from the cache line it came in straight to a tile.
void multiply_few(const Product& p, int item, bool has_second) {
  const int64_t width = p.linear->num_inputs;
  const int format = p.linear->format;
  const int64_t bytes = group_bytes(format), panel = panel_bytes(format, width);
  const uint8_t* first = p.linear->data + 2 * item * panel;
  const uint8_t* second = has_second ? first + panel : first;
  alignas(64) bf16 ring[4][2][GROUP * TILE];
  alignas(64) float sums[32 * 32];
  configure_product(p.num_rows);
  multiply_rows(p, 0, p.num_rows, 0, width, sums, [&](int64_t k, const bf16** tiles) {
    const int64_t g = k / GROUP;
    // Panels lie one after the other, and so do the items of a thread.
    prefetch(first + g * bytes + PREFETCH_BYTES, bytes);
    prefetch(second + g * bytes + PREFETCH_BYTES, bytes);
    dequantize_group(first + g * bytes, format, ring[g % 4][0]);
    dequantize_group(second + g * bytes, format, ring[g % 4][1]);
    tiles[0] = ring[g % 4][0];
    tiles[1] = ring[g % 4][1];
  });
  finish_rows(p, item, 0, p.num_rows, sums, has_second);
}

// Up to four tiles of rows with one panel at a time. Accumulators 0-3, inputs 4-6, weights 7.
template <int R>
inline void multiply_tall(const Product& p, const uint8_t* panel, float* sums) {
  const int64_t width = p.linear->num_inputs, stride = width * 2, bytes = group_bytes(p.linear->format);
  alignas(64) bf16 ring[4][GROUP * TILE];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  if (R > 3) _tile_zero(3);
  for (int64_t k = 0; k < width; k += GROUP) {
    const int64_t g = k / GROUP;
    prefetch(panel + g * bytes + PREFETCH_BYTES, bytes);
    dequantize_group(panel + g * bytes, p.linear->format, ring[g % 4]);
    const bf16* inputs = p.inputs + k;
    _tile_loadd(4, inputs, stride);
    _tile_loadd(7, ring[g % 4], 64);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, inputs + TILE * width, stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, inputs + 2 * TILE * width, stride);
    _tile_dpbf16ps(2, 6, 7);
    if (R > 3) {
      _tile_loadd(4, inputs + 3 * TILE * width, stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16 * 32, 128);
  _tile_stored(2, sums + 32 * 32, 128);
  if (R > 3) _tile_stored(3, sums + 48 * 32, 128);
}

void multiply_some(const Product& p, int item, bool has_second) {
  const int64_t panel = panel_bytes(p.linear->format, p.linear->num_inputs);
  const uint8_t* data = p.linear->data + 2 * item * panel;
  alignas(64) float sums[64 * 32];
  configure_product(2 * TILE);
  for (int which = 0; which <= int(has_second); which++) {
    if (p.num_rows > 3 * TILE) multiply_tall<4>(p, data + which * panel, sums + which * 16);
    else multiply_tall<3>(p, data + which * panel, sums + which * 16);
  }
  finish_rows(p, item, 0, p.num_rows, sums, has_second);
}

// Many rows use a weight often: a chunk of the panels that stays in the first-level cache is
// multiplied with all rows before the next is opened.
void multiply(const Product& p, int item, uint8_t* scratch) {
  const bool has_second = item * 2 + 1 < p.linear->num_outputs / TILE;
  if (p.linear->format != HW_BF16 && p.num_rows <= 4 * TILE) {
    if (p.num_rows <= 2 * TILE) multiply_few(p, item, has_second);
    else multiply_some(p, item, has_second);
    return;
  }
  const int64_t width = p.linear->num_inputs;
  bf16* opened = (bf16*)scratch;
  float* sums = (float*)(opened + 2 * PANEL_CHUNK * TILE);
  for (int64_t from = 0; from < width; from += PANEL_CHUNK) {
    const int64_t to = from + PANEL_CHUNK < width ? from + PANEL_CHUNK : width;
    const bf16* first = open_panel(*p.linear, item * 2, from, to, opened);
    const bf16* second = first;
    if (has_second) {
      second = open_panel(*p.linear, item * 2 + 1, from, to, opened + PANEL_CHUNK * TILE);
    }
    const auto weights = [&](int64_t k, const bf16** tiles) {
      tiles[0] = first + (k - from) * TILE;
      tiles[1] = second + (k - from) * TILE;
    };
    int configured = 0;
    for (int row = 0; row < p.num_rows; row += 2 * TILE) {
      const int count = p.num_rows - row < 2 * TILE ? p.num_rows - row : 2 * TILE;
      if (count != configured) configure_product(count);
      configured = count;
      multiply_rows(p, row, count, from, to, sums + row * 32, weights);
      if (to == width) finish_rows(p, item, row, count, sums + row * 32, has_second);
    }
  }
}

void thread_end() { _tile_release(); }

#else

// Adds the inputs `from` to `to` to the sums of R rows with one panel.
template <int R>
inline void multiply_rows(const Product& p, int row, int64_t from, int64_t to, const bf16* panel,
                          float* sums) {
  const int64_t width = p.linear->num_inputs;
  const bf16* inputs = p.inputs + row * width;
  v16f sum[R] = {};
  if (from) {
    for (int r = 0; r < R; r++) sum[r] = loadf(sums + r * 32);
  }
  for (int64_t k = from; k < to; k += 2) {
    const v16u pairs = load<v16u>(panel + (k - from) * TILE);
    const v16f even = even_of(pairs), odd = odd_of(pairs);
    for (int r = 0; r < R; r++) {
      sum[r] += to_float(inputs[r * width + k]) * even;
      sum[r] += to_float(inputs[r * width + k + 1]) * odd;
    }
  }
  for (int r = 0; r < R; r++) store(sums + r * 32, sum[r]);
}

void multiply(const Product& p, int item, uint8_t* scratch) {
  const bool has_second = item * 2 + 1 < p.linear->num_outputs / TILE;
  const int64_t width = p.linear->num_inputs;
  bf16* opened = (bf16*)scratch;
  float* sums = (float*)(opened + 2 * PANEL_CHUNK * TILE);
  for (int64_t from = 0; from < width; from += PANEL_CHUNK) {
    const int64_t to = from + PANEL_CHUNK < width ? from + PANEL_CHUNK : width;
    for (int which = 0; which <= int(has_second); which++) {
      const bf16* panel = open_panel(*p.linear, item * 2 + which, from, to, opened);
      int row = 0;
      for (; row + 4 <= p.num_rows; row += 4) {
        multiply_rows<4>(p, row, from, to, panel, sums + row * 32 + which * 16);
      }
      for (; row < p.num_rows; row++) {
        multiply_rows<1>(p, row, from, to, panel, sums + row * 32 + which * 16);
      }
    }
  }
  for (int r = 0; r < p.num_rows; r++) {
    finish(p, item, r, loadf(sums + r * 32), loadf(sums + r * 32 + 16), has_second);
  }
}

void thread_end() {}

#endif

// ---- attention ----

struct Tiles {
  const Attention& a;
  int first;  // tile of 16 places
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

inline int place_of(const Attention& a, int row) {
  return a.start + (a.first_row + row) / a.group_size;
}

// The first place that a query at `place` sees.
inline int oldest(const Attention& a, int place) {
  int first = place >= a.padding ? a.padding : 0;
  if (a.window && place - a.window + 1 > first) first = place - a.window + 1;
  return first;
}

inline Tiles tiles_of(const Attention& a) {
  int first = oldest(a, place_of(a, 0));
  for (int r = 1; r < a.num_rows; r++) {
    const int other = oldest(a, place_of(a, r));
    first = other < first ? other : first;
  }
  const int last = place_of(a, a.num_rows - 1);
  return {a, first / TILE, last / TILE, kv_tile_bytes(a.kv_format, a.head_dim), a.block_size / TILE};
}

// Scores of one row in place; exponentials to `weights`; returns their sum.
// With int8 values, a key's weight takes in the scale of its values.
inline float softmax_row(const Attention& a, const Tiles& tiles, int row, float* scores,
                         bf16* weights) {
  constexpr v16i LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float scale = 1.0f / __builtin_sqrtf(float(a.head_dim));
  const int place = place_of(a, row), from = oldest(a, place);
  const int64_t num = tiles.num();
  const int64_t scales_at = int64_t{TILE} * a.head_dim;
  v16f top = splat(-__builtin_inff());
  for (int64_t t = 0; t < num; t++) {
    v16f s = loadf(scores + t * TILE);
    if (a.kv_format == HW_INT8) {
      s *= load<v16f>(tiles.keys(int(tiles.first + t)) + scales_at);
    }
    s *= scale;
    const int key = int(tiles.first + t) * TILE;
    if (key < from || key + TILE - 1 > place) {
      const v16i keys = LANES + key;
      s = ((keys >= from) & (keys <= place)) ? s : splat(-__builtin_inff());
    }
    store(scores + t * TILE, s);
    top = maximum(top, s);
  }
  const float best = hmax(top);
  v16f sum = {};
  for (int64_t t = 0; t < num; t++) {
    const v16f s = loadf(scores + t * TILE);
    v16f e = exp_(s - best);
    const int key = int(tiles.first + t) * TILE;
    const bool is_edge = key < from || key + TILE - 1 > place;
    if (is_edge) e = s == -__builtin_inff() ? v16f{} : e;
    sum += e;
    if (a.kv_format == HW_INT8) {
      e *= load<v16f>(tiles.values(int(tiles.first + t)) + scales_at);
      if (is_edge) e = s == -__builtin_inff() ? v16f{} : e;
    }
    store(weights + t * TILE, round_bf16(e));
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
  bf16* converted;  // one tile
  int64_t padded;

  AttentionScratch(uint8_t* memory, int64_t num_tiles, int head_dim) {
    padded = num_tiles * TILE;
    mixed = (float*)memory;
    converted = (bf16*)(mixed + TILE * head_dim);
    scores = (float*)(converted + TILE * head_dim);
    weights = (bf16*)(scores + TILE * padded);
  }
};

inline const bf16* as_bf16(const uint8_t* tile, const Attention& a, bf16* converted) {
  if (a.kv_format == HW_BF16) return (const bf16*)tile;
  int8_to_bf16(tile, TILE * a.head_dim, converted);
  return converted;
}

#if defined(HW_WITH_AMX)

// Tiles 0-4 have a row per query and 64 bytes, 5 holds keys, 6 values, 7 weights.
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
  _tile_loadconfig(&config);
}

inline void score_keys(const Attention& a, const Tiles& tiles, const AttentionScratch& s) {
  const int64_t stride = int64_t{a.head_dim} * 2;
  const int parts = a.head_dim / 32;
  _tile_loadd(1, a.queries, stride);
  if (parts > 1) _tile_loadd(2, a.queries + 32, stride);
  if (parts > 2) _tile_loadd(3, a.queries + 64, stride);
  if (parts > 3) _tile_loadd(4, a.queries + 96, stride);
  for (int t = tiles.first; t <= tiles.last; t++) {
    const bf16* keys = as_bf16(tiles.keys(t), a, s.converted);
    _tile_zero(0);
    _tile_loadd(5, keys, 64);
    _tile_dpbf16ps(0, 1, 5);
    if (parts > 1) {
      _tile_loadd(5, keys + 512, 64);
      _tile_dpbf16ps(0, 2, 5);
    }
    if (parts > 2) {
      _tile_loadd(5, keys + 1024, 64);
      _tile_dpbf16ps(0, 3, 5);
    }
    if (parts > 3) {
      _tile_loadd(5, keys + 1536, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, s.scores + (t - tiles.first) * TILE, s.padded * 4);
  }
}

// Up to 64 columns of the values, from column `from` on.
inline void mix_values(const Attention& a, const Tiles& tiles, const AttentionScratch& s, int from) {
  const int parts = (a.head_dim - from) / TILE < 4 ? (a.head_dim - from) / TILE : 4;
  const int64_t stride = int64_t{a.head_dim} * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int t = tiles.first; t <= tiles.last; t++) {
    const bf16* values = as_bf16(tiles.values(t), a, s.converted) + from * 2;
    _tile_loadd(7, s.weights + (t - tiles.first) * TILE, s.padded * 2);
    _tile_loadd(6, values, stride);
    _tile_dpbf16ps(0, 7, 6);
    _tile_loadd(6, values + 32, stride);
    _tile_dpbf16ps(1, 7, 6);
    if (parts > 2) {
      _tile_loadd(6, values + 64, stride);
      _tile_dpbf16ps(2, 7, 6);
      _tile_loadd(6, values + 96, stride);
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

void attend(const Attention& a, uint8_t* memory) {
  const Tiles tiles = tiles_of(a);
  const AttentionScratch s(memory, tiles.num(), a.head_dim);
  for (int t = tiles.first; t <= tiles.last; t++) {
    const bf16* keys = as_bf16(tiles.keys(t), a, s.converted);
    for (int r = 0; r < a.num_rows; r++) {
      const bf16* query = a.queries + r * a.head_dim;
      v16f sum = {};
      for (int d = 0; d < a.head_dim; d += 2) {
        const v16u pairs = load<v16u>(keys + d * TILE);
        sum += to_float(query[d]) * even_of(pairs);
        sum += to_float(query[d + 1]) * odd_of(pairs);
      }
      store(s.scores + r * s.padded + (t - tiles.first) * TILE, sum);
    }
  }
  float sums[TILE];
  for (int r = 0; r < a.num_rows; r++) {
    sums[r] = softmax_row(a, tiles, r, s.scores + r * s.padded, s.weights + r * s.padded);
  }
  memset(s.mixed, 0, sizeof(float) * TILE * a.head_dim);
  for (int t = tiles.first; t <= tiles.last; t++) {
    const bf16* values = as_bf16(tiles.values(t), a, s.converted);
    for (int r = 0; r < a.num_rows; r++) {
      const bf16* weights = s.weights + r * s.padded + (t - tiles.first) * TILE;
      float* mixed = s.mixed + r * a.head_dim;
      for (int d = 0; d < a.head_dim; d += 16) {
        v16f sum = loadf(mixed + d);
        for (int key = 0; key < TILE; key += 2) {
          const v16u pairs = load<v16u>(values + key * a.head_dim + d * 2);
          sum += to_float(weights[key]) * even_of(pairs);
          sum += to_float(weights[key + 1]) * odd_of(pairs);
        }
        store(mixed + d, sum);
      }
    }
  }
  for (int r = 0; r < a.num_rows; r++) finish_attention(a, r, s.mixed + r * a.head_dim, sums[r]);
}

#endif

// ---- rows ----

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

void norm_rotate(float* x, const float* weight, float eps, const float* cosines,
                 const float* sines, int head_dim) {
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

// Numbers of -127 to 127 in `to`; returns what to multiply them with.
inline float quantize(const float* x, int size, int8_t* to) {
  const float top = largest(x, size);
  const float factor = top > 0.0f ? 127.0f / top : 0.0f;
  for (int i = 0; i < size; i += 16) {
    v16f scaled = loadf(x + i) * factor;
    v16f rounded = (scaled + 12582912.0f) - 12582912.0f;
    v16i whole = __builtin_convertvector(rounded, v16i);
    for (int j = 0; j < 16; j++) to[i + j] = int8_t(whole[j]);
  }
  return top / 127.0f;
}

void write_kv(const float* key, const float* value, int offset, int head_dim, int format,
              uint8_t* key_tile, uint8_t* value_tile) {
  if (format == HW_INT8) {
    int8_t keys[512], values[512];
    const float key_scale = quantize(key, head_dim, keys);
    const float value_scale = quantize(value, head_dim, values);
    int8_t* key_to = (int8_t*)key_tile;
    int8_t* value_to = (int8_t*)value_tile;
    for (int d = 0; d < head_dim; d++) {
      key_to[d / 2 * 32 + offset * 2 + d % 2] = keys[d];
      value_to[offset / 2 * head_dim * 2 + d * 2 + offset % 2] = values[d];
    }
    memcpy(key_tile + TILE * head_dim + offset * 4, &key_scale, 4);
    memcpy(value_tile + TILE * head_dim + offset * 4, &value_scale, 4);
    return;
  }
  alignas(64) bf16 keys[512], values[512];
  to_bf16(key, head_dim, keys);
  to_bf16(value, head_dim, values);
  for (int d = 0; d < head_dim; d += 2) memcpy(key_tile + d * 32 + offset * 4, keys + d, 4);
  bf16* value_to = (bf16*)value_tile + offset / 2 * head_dim * 2 + offset % 2;
  for (int d = 0; d < head_dim; d++) value_to[d * 2] = values[d];
}

void clear_values(int from, int head_dim, uint8_t* value_tile) {
  bf16* values = (bf16*)value_tile;
  for (int offset = from; offset < TILE; offset++) {
    bf16* to = values + offset / 2 * head_dim * 2 + offset % 2;
    for (int d = 0; d < head_dim; d++) to[d * 2] = 0;
  }
}

const Ops OPS = {multiply, attend,       norm,  norm_rotate, to_bf16,
                 write_kv, clear_values, embed, thread_end};

}  // namespace

namespace headway {

#define HW_NAME_OF(isa) isa##_ops
#define HW_NAME(isa) HW_NAME_OF(isa)
const Ops* HW_NAME(HW_ISA_NAME)() { return &OPS; }

}  // namespace headway
