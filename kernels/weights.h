// Unpacks weights to bf16. Compiled once per instruction set.

#pragma once

#include "ops.h"
#include "vec.h"

namespace {

using namespace headway;

// Unpacks one quantized group of 32 inputs of a panel. `write(pair, low, high)` gets two inputs of
// outputs 0 - 7 and of outputs 8 - 15: output n has lanes 2n and 2n + 1.
template <typename Write>
inline void unpack_group(const uint8_t* from, int format, const Write& write) {
  const v16f scale = quiet(from_fp16(from));
  const v16f low = double_low(scale), high = double_high(scale);
  if (format == HW_INT8) {
    for (int pair = 0; pair < 16; pair++) {
      const uint8_t* bytes = from + 32 + pair * 32;
      const v16i a = widen_i8(bytes), b = widen_i8(bytes + 16);
      write(pair, __builtin_convertvector(a, v16f) * low, __builtin_convertvector(b, v16f) * high);
    }
    return;
  }
  const v16f offset = quiet(from_fp16(from + 32));
  const v16f low_offset = double_low(offset), high_offset = double_high(offset);
  for (int four = 0; four < 4; four++) {
    // One byte per pair: outputs of the first half in the low bits, of the second in the high bits.
    v16u bits = load<v16u>(from + 64 + four * 64);
    for (int pair = four * 4; pair < four * 4 + 4; pair++) {
      const v16f a = low_nibble(bits), b = low_nibble(bits >> 4);
      write(pair, a * low + low_offset, b * high + high_offset);
      bits >>= 8;
    }
  }
}

// One group of 32 inputs of a panel as bf16: [16 pairs][16 outputs][2].
inline void dequantize_group(const uint8_t* from, int format, bf16* to) {
  constexpr int P = 32;  // numbers per pair of inputs
  if (format == HW_BF16) {
    memcpy(to, from, 1024);
    return;
  }
  unpack_group(from, format,
               [to](int pair, v16f low, v16f high) { store_bf16(to + pair * P, low, high); });
}

// The same numbers as fp32: [32 inputs][16 outputs].
inline void dequantize_group_fp32(const uint8_t* from, int format, float* to) {
  if (format == HW_BF16) {
    for (int pair = 0; pair < 16; pair++) {
      const v16u pairs = load<v16u>(from + pair * 64);
      store(to + pair * 32, even_of(pairs));
      store(to + pair * 32 + 16, odd_of(pairs));
    }
    return;
  }
  unpack_group(from, format, [to](int pair, v16f low, v16f high) {
    const v16u a = (v16u)rounded_to_bf16(low), b = (v16u)rounded_to_bf16(high);
    store(to + pair * 32, even_lanes(a, b));
    store(to + pair * 32 + 16, odd_lanes(a, b));
  });
}

constexpr int64_t PREFETCH_BYTES = 8192;

inline void prefetch(const uint8_t* from, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// Returns inputs `from` to `to` of a panel as bf16 pairs; bf16 weights are not copied.
inline const bf16* open_panel(const HwLinear& linear, int panel, int64_t from, int64_t to,
                              bf16* scratch) {
  const uint8_t* data = linear.data + panel * panel_bytes(linear.format, linear.num_inputs);
  const int64_t step = group_bytes(linear.format);
  if (linear.format == HW_BF16) return (const bf16*)(data + from / GROUP * step);
  for (int64_t g = from / GROUP; g < to / GROUP; g++) {
    // Prefetch the next piece while this one is multiplied.
    prefetch(data + g * step + PANEL_CHUNK / GROUP * step, step);
    dequantize_group(data + g * step, linear.format, scratch + (g * GROUP - from) * TILE);
  }
  return scratch;
}

// Unpacks groups of a panel, and prefetches as many behind them for the next call.
inline void open_groups(const uint8_t* from, int format, int64_t num_groups, float* to) {
  const int64_t bytes = group_bytes(format);
  for (int64_t g = 0; g < num_groups; g++) {
    prefetch(from + (num_groups + g) * bytes, bytes);
    dequantize_group_fp32(from + g * bytes, format, to + g * GROUP * TILE);
  }
}

void embed(const HwLinear& table, int token_id, float* out) {
  const uint8_t* panel = table.data + token_id / TILE * panel_bytes(table.format, table.num_inputs);
  const int column = token_id % TILE;
  alignas(64) bf16 group[GROUP * TILE];
  for (int g = 0; g < table.num_inputs / GROUP; g++) {
    dequantize_group(panel + g * group_bytes(table.format), table.format, group);
    for (int k = 0; k < GROUP; k++) {
      out[g * GROUP + k] = to_float(group[k / 2 * 32 + column * 2 + k % 2]);
    }
  }
}

}  // namespace
