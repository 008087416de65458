// Products of activations with packed weights, and their epilogues. Compiled once per instruction
// set.

#pragma once

#include "ops.h"
#include "vec.h"
#include "weights.h"
#if defined(HW_WITH_AMX)
#include "tiles.h"
#endif

namespace {

using namespace headway;

// The epilogue of one row of sums of an item: columns 32 * item ... + 31.
inline void finish(const Product& p, int item, int row, v16f a, v16f b, bool has_second) {
  const int column = item * 32;
  if (p.linear->bias) {
    a += loadf(p.linear->bias + column);
    if (has_second) b += loadf(p.linear->bias + column + 16);
  }
  switch (p.epilogue) {
    case Epilogue::SiluMul:
      store(p.out_bf16 + row * p.out_stride + item * 16,
            round_bf16(a * reciprocal(1.0f + exp_(-a)) * b));
      return;
    case Epilogue::Add: {
      float* out = p.out + row * p.out_stride + column;
      store(out, loadf(out) + a);
      if (has_second) store(out + 16, loadf(out + 16) + b);
      return;
    }
    case Epilogue::Best: {
      float* best = p.best + row * 32;  // 16 maxima, then 16 sums: NaN if one is not finite
      int32_t* ids = p.best_ids + row * 16;
      constexpr v16i LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      v16f top = loadf(best);
      v16i id = load<v16i>(ids);
      v16f check = loadf(best + 16) + a * 0.0f;
      if (has_second) check += b * 0.0f;
      if (p.masks && row >= p.num_out_rows && p.masks[row]) {
        const uint32_t bits = reinterpret_cast<const uint32_t*>(p.masks[row])[item];
        a = keep_lanes(a, bits);
        b = keep_lanes(b, bits >> 16);
      }
      // The lowest id wins ties, whatever the order of items.
      const v16i at = LANES + column;
      const v16i is_better = (a > top) | ((a == top) & (at < id));
      id = is_better ? at : id;
      top = a > top ? a : top;
      if (has_second) {
        const v16i is_better_still = (b > top) | ((b == top) & (at + 16 < id));
        id = is_better_still ? at + 16 : id;
        top = b > top ? b : top;
      }
      store(best, top);
      store(best + 16, check);
      store(ids, id);
      if (row >= p.num_out_rows) return;
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
  load_config(config);
}

// Prefetches the inputs of 16 rows for the tile three groups ahead. They are in the L2 cache at
// best, with a large stride between rows, which the hardware prefetcher does not detect.
inline void prefetch_rows(const bf16* inputs, int64_t width) {
  constexpr int AHEAD = 3 * GROUP;
  for (int r = 0; r < TILE; r++) __builtin_prefetch(inputs + r * width + AHEAD, 0, 3);
}

// Adds the inputs `from` to `to` to the sums of up to 32 rows with two panels; clears the sums
// first if `from` is 0. `weights(input)` returns 32 inputs of both panels, as two tiles.
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
    HW_TILE_LOAD(0, sums, 128);
    HW_TILE_LOAD(1, sums + 16, 128);
    if (TWO) {
      HW_TILE_LOAD(2, sums + 512, 128);
      HW_TILE_LOAD(3, sums + 528, 128);
    }
  }
  for (int64_t k = from; k < to; k += GROUP) {
    const bf16* tiles[2];
    weights(k, tiles);
    HW_TILE_LOAD(6, tiles[0], 64);
    HW_TILE_LOAD(4, inputs + k, width * 2);
    HW_TILE_LOAD(7, tiles[1], 64);
    if (TWO) prefetch_rows(inputs + k, width);
    _tile_dpbf16ps(0, 4, 6);
    if (TWO) {
      HW_TILE_LOAD(5, inputs + k + width * TILE, width * 2);
      prefetch_rows(inputs + k + width * TILE, width);
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
  if (count > TILE)
    multiply_block<true>(p, row, from, to, sums, weights);
  else
    multiply_block<false>(p, row, from, to, sums, weights);
}

inline void finish_rows(const Product& p, int item, int row, int count, const float* sums,
                        bool has_second) {
  for (int r = 0; r < count; r++) {
    finish(p, item, row + r, loadf(sums + r * 32), loadf(sums + r * 32 + 16), has_second);
  }
}

// With few rows a weight is used once: it is unpacked directly into a tile.
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
    // Panels are contiguous, and so are the items of a thread.
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
  const int64_t width = p.linear->num_inputs, stride = width * 2,
                bytes = group_bytes(p.linear->format);
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
    HW_TILE_LOAD(4, inputs, stride);
    HW_TILE_LOAD(7, ring[g % 4], 64);
    _tile_dpbf16ps(0, 4, 7);
    HW_TILE_LOAD(5, inputs + TILE * width, stride);
    _tile_dpbf16ps(1, 5, 7);
    HW_TILE_LOAD(6, inputs + 2 * TILE * width, stride);
    _tile_dpbf16ps(2, 6, 7);
    if (R > 3) {
      HW_TILE_LOAD(4, inputs + 3 * TILE * width, stride);
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
    if (p.num_rows > 3 * TILE)
      multiply_tall<4>(p, data + which * panel, sums + which * 16);
    else
      multiply_tall<3>(p, data + which * panel, sums + which * 16);
  }
  finish_rows(p, item, 0, p.num_rows, sums, has_second);
}

// With many rows a weight is used often: a piece of the panels is unpacked once for all rows.
void multiply(const Product& p, int item, uint8_t* scratch) {
  const bool has_second = item * 2 + 1 < p.linear->num_outputs / TILE;
  if (p.linear->format != HW_BF16 && p.num_rows <= 4 * TILE) {
    if (p.num_rows <= 2 * TILE)
      multiply_few(p, item, has_second);
    else
      multiply_some(p, item, has_second);
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

// As many sums as the registers hold: those of up to MAX_ROWS rows with PANELS panels.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12, PANELS = 2;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6, PANELS = 1;
#else
constexpr int MAX_ROWS = 2, PANELS = 1;
#endif
constexpr int FEW_ROWS = MAX_ROWS < 4 ? MAX_ROWS : 4;

// Adds `count` inputs to the sums of R rows; clears the sums first if `is_first`.
// `weights(input, panels)` sets the weights of 32 inputs of each panel, as fp32.
template <int R, typename Weights>
void multiply_block(const float* inputs, int64_t count, bool is_first, float* sums,
                    const Weights& weights) {
  v16f sum[R][PANELS];
  for (int r = 0; r < R; r++) {
    for (int p = 0; p < PANELS; p++) sum[r][p] = is_first ? v16f{} : loadf(sums + r * 32 + p * 16);
  }
  for (int64_t k = 0; k < count; k += GROUP) {
    const float* panels[PANELS];
    weights(k, panels);
    for (int i = 0; i < GROUP; i++) {
      v16f weight[PANELS];
      for (int p = 0; p < PANELS; p++) weight[p] = loadf(panels[p] + i * TILE);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const float input = inputs[r * FP32_CHUNK + k + i];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) sum[r][p] += input * weight[p];
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int p = 0; p < PANELS; p++) store(sums + r * 32 + p * 16, sum[r][p]);
  }
}

template <int R, typename Weights>
inline void multiply_rows(int num_rows, const float* inputs, int64_t count, bool is_first,
                          float* sums, const Weights& weights) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      multiply_rows<R - 1>(num_rows, inputs, count, is_first, sums, weights);
      return;
    }
  }
  multiply_block<R>(inputs, count, is_first, sums, weights);
}

// Chunk by chunk of the inputs. With few rows a weight is used once, directly after it is unpacked;
// otherwise a chunk of the panels is unpacked once for all rows.
void multiply(const Product& p, int item, uint8_t* scratch) {
  const int num_panels = item * 2 + 1 < p.linear->num_outputs / TILE ? 2 : 1;
  const int64_t width = p.linear->num_inputs;
  const int format = p.linear->format;
  const int64_t bytes = group_bytes(format), panel_size = panel_bytes(format, width);
  const uint8_t* data = p.linear->data + 2 * item * panel_size;
  float* opened = (float*)scratch;
  float* inputs = opened + 2 * FP32_CHUNK * TILE;
  float* sums = inputs + MAX_FP32_ROWS * FP32_CHUNK;
  const bool is_few = p.num_rows <= FEW_ROWS;
  const int num_blocks = (p.num_rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t from = 0; from < width; from += FP32_CHUNK) {
    const int64_t count = width - from < FP32_CHUNK ? width - from : FP32_CHUNK;
    const uint8_t* groups[2] = {data + from / GROUP * bytes, data + from / GROUP * bytes};
    if (num_panels > 1) groups[1] += panel_size;
    for (int which = 0; which < num_panels && !is_few; which++) {
      open_groups(groups[which], format, count / GROUP, opened + which * FP32_CHUNK * TILE);
    }
    for (int block = 0; block < num_blocks; block++) {
      const int row = p.num_rows * block / num_blocks;
      const int num_rows = p.num_rows * (block + 1) / num_blocks - row;
      for (int r = 0; r < num_rows; r++) {
        widen_bf16(p.inputs + (row + r) * width + from, count, inputs + r * FP32_CHUNK);
      }
      for (int which = 0; which < num_panels; which += PANELS) {
        float* block_sums = sums + row * 32 + which * 16;
        if (is_few) {
          alignas(64) float ring[2][PANELS][GROUP * TILE];
          const auto weights = [&](int64_t k, const float** panels) {
            const int64_t g = k / GROUP;
            for (int panel = 0; panel < PANELS; panel++) {
              const uint8_t* group = groups[which + panel] + g * bytes;
              // Panels are contiguous, and so are the items of a thread.
              prefetch(group + PREFETCH_BYTES, bytes);
              float* to = ring[g % 2][panel];
              dequantize_group_fp32(group, format, to);
              panels[panel] = to;
            }
          };
          multiply_rows<FEW_ROWS>(num_rows, inputs, count, from == 0, block_sums, weights);
        } else {
          const auto weights = [&](int64_t k, const float** panels) {
            for (int panel = 0; panel < PANELS; panel++) {
              const int at = num_panels > 1 ? which + panel : 0;
              panels[panel] = opened + (at * FP32_CHUNK + k) * TILE;
            }
          };
          multiply_rows<MAX_ROWS>(num_rows, inputs, count, from == 0, block_sums, weights);
        }
      }
    }
  }
  for (int r = 0; r < p.num_rows; r++) {
    finish(p, item, r, loadf(sums + r * 32), loadf(sums + r * 32 + 16), num_panels > 1);
  }
}

void thread_end() {}

#endif

}  // namespace
