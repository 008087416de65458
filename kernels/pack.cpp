// Packs weights: from rows of checkpoints to panels of products.
//
// A tile is one group of a panel: 32 inputs of 16 outputs. It is gathered from 16 rows and written
// at once, so that no byte of the panel is written twice.

#include <cmath>
#include <cstring>

#include "ops.h"
#include "vec.h"

namespace headway {
namespace {

float from_half(uint16_t h) {
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  float f;
  std::memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;  // infinity or NaN
  bits |= uint32_t(h & 0x8000) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Rounds to nearest, ties to even; finite numbers stay finite.
uint16_t to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float size = std::fabs(f);
  if (size != size) return 0x7e00;
  if (std::isinf(size)) return sign | 0x7c00;
  if (size >= 65504.0f) return sign | 0x7bff;
  if (size < 0x1p-14f) return sign | uint16_t(std::nearbyint(size * 0x1p24f));
  bits &= 0x7fffffff;
  bits += 0xfff + (bits >> 13 & 1);
  return sign | uint16_t((bits >> 13) - (112 << 10));
}

uint16_t to_bfloat(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return f != f ? uint16_t{0x7fc0} : uint16_t(rounded);
}

float half_at(const uint8_t* from) {
  uint16_t h;
  std::memcpy(&h, from, 2);
  return from_half(h);
}

// 32 weights of one output: values, or integers times a scale plus an offset.
struct Group {
  float values[GROUP];
  int8_t numbers[GROUP];
  float scale;
  float offset;
};

struct Tile {
  uint16_t bfloats[TILE][GROUP];
  uint8_t numbers[TILE][GROUP];
  uint16_t scales[TILE];
  uint16_t offsets[TILE];
};

// Hardware does not follow 16 rows at once.
constexpr int AHEAD_BYTES = 512;

struct Block {
  int num_weights;
  int num_bytes;
};

Block block_of(int source) {
  switch (source) {
    case HW_FROM_F32:
      return {GROUP, GROUP * 4};
    case HW_FROM_F16:
    case HW_FROM_BF16:
      return {GROUP, GROUP * 2};
    case HW_FROM_Q4_0:
      return {GROUP, 18};
    case HW_FROM_Q4_1:
      return {GROUP, 20};
    case HW_FROM_Q5_0:
      return {GROUP, 22};
    case HW_FROM_Q5_1:
      return {GROUP, 24};
    case HW_FROM_Q8_0:
      return {GROUP, 34};
    case HW_FROM_Q4_K:
      return {8 * GROUP, 144};
    case HW_FROM_Q5_K:
      return {8 * GROUP, 176};
    default:
      return {8 * GROUP, 210};
  }
}

// The 16 bytes hold two numbers each: k in the low bits, k + 16 in the high bits.
void read_nibbles(const uint8_t* from, int8_t* numbers) {
  for (int k = 0; k < 16; k++) numbers[k] = int8_t(from[k] & 15);
  for (int k = 0; k < 16; k++) numbers[k + 16] = int8_t(from[k] >> 4);
}

// Adds `high` of a 32-bit set to each number whose bit is set.
void add_high_bits(const uint8_t* from, int high, int8_t* numbers) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int k = 0; k < GROUP; k++) numbers[k] = int8_t(numbers[k] + ((bits >> k & 1) ? high : 0));
}

void subtract(int8_t center, int8_t* numbers) {
  for (int k = 0; k < GROUP; k++) numbers[k] = int8_t(numbers[k] - center);
}

// Scale and offset of group `part` of a Q4_K or Q5_K block: 6 bits each, the highest two of the
// last four groups beside those of the first four.
void read_scales(const uint8_t* from, int part, Group& group) {
  const uint8_t* packed = from + 4;
  int scale = packed[part % 4] & 63, least = packed[4 + part % 4] & 63;
  if (part >= 4) {
    scale = (packed[4 + part] & 15) | (packed[part - 4] >> 6 << 4);
    least = packed[4 + part] >> 4 | (packed[part] >> 6 << 4);
  }
  group.scale = half_at(from) * float(scale);
  group.offset = -(half_at(from + 2) * float(least));
}

// Two groups share 32 bytes: the even one has the low bits.
void read_quarters(const uint8_t* from, int part, int8_t* numbers) {
  const uint8_t* bytes = from + part / 2 * GROUP;
  const int shift = part % 2 * 4;
  for (int k = 0; k < GROUP; k++) numbers[k] = int8_t(bytes[k] >> shift & 15);
}

// Has a scale for every 16 weights, so that its integers fit no group.
void read_q6_k(const uint8_t* from, int part, Group& group) {
  const int half = part / 4, quarter = part % 4;
  const uint8_t* low = from + half * 64 + quarter % 2 * GROUP;
  const uint8_t* high = from + 128 + half * GROUP;
  const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
  for (int k = 0; k < GROUP; k++) {
    group.numbers[k] = int8_t(((low[k] >> low_shift & 15) | (high[k] >> high_shift & 3) << 4) - 32);
  }
  for (int which = 0; which < 2; which++) {
    const float scale = half_at(from + 208) * float(int8_t(from[192 + part * 2 + which]));
    for (int k = which * 16; k < which * 16 + 16; k++) {
      group.values[k] = scale * float(group.numbers[k]);
    }
  }
}

// Reads integers, scale and offset; returns true if they fit `format` as they are.
bool read_numbers(const uint8_t* from, int source, int part, int format, Group& group) {
  group.offset = 0.0f;
  if (source == HW_FROM_Q4_K || source == HW_FROM_Q5_K) {
    read_scales(from, part, group);
    const bool has_fifth = source == HW_FROM_Q5_K;
    read_quarters(from + (has_fifth ? 48 : 16), part, group.numbers);
    if (!has_fifth) return format == HW_INT4;
    for (int k = 0; k < GROUP; k++) {
      group.numbers[k] = int8_t(group.numbers[k] | (from[16 + k] >> part & 1) << 4);
    }
    return false;
  }
  group.scale = half_at(from);
  switch (source) {
    case HW_FROM_Q8_0:
      std::memcpy(group.numbers, from + 2, GROUP);
      return format == HW_INT8;
    case HW_FROM_Q4_0:
      read_nibbles(from + 2, group.numbers);
      if (format == HW_INT4) {
        group.offset = -8.0f * group.scale;
        return true;
      }
      subtract(8, group.numbers);
      return format == HW_INT8;
    case HW_FROM_Q5_0:
      read_nibbles(from + 6, group.numbers);
      add_high_bits(from + 2, 16, group.numbers);
      subtract(16, group.numbers);
      return format == HW_INT8;
    case HW_FROM_Q5_1:
      group.offset = half_at(from + 2);
      read_nibbles(from + 8, group.numbers);
      add_high_bits(from + 4, 16, group.numbers);
      return false;
    default:
      group.offset = half_at(from + 2);
      read_nibbles(from + 4, group.numbers);
      return format == HW_INT4;
  }
}

// Reads group `part` of a block; returns true if its integers fit `format` as they are.
bool read_group(const uint8_t* from, int source, int part, int format, Group& group) {
  switch (source) {
    case HW_FROM_F32:
      std::memcpy(group.values, from, sizeof(group.values));
      return false;
    case HW_FROM_F16:
      for (int k = 0; k < GROUP; k++) group.values[k] = half_at(from + k * 2);
      return false;
    case HW_FROM_BF16:
      for (int k = 0; k < GROUP; k++) {
        uint16_t value;
        std::memcpy(&value, from + k * 2, 2);
        group.values[k] = to_float(value);
      }
      return false;
    case HW_FROM_Q6_K:
      read_q6_k(from, part, group);
      return false;
    default:
      if (read_numbers(from, source, part, format, group)) return true;
  }
  for (int k = 0; k < GROUP; k++) {
    group.values[k] = group.scale * float(group.numbers[k]) + group.offset;
  }
  return false;
}

// Rounds (values - offset) / scale to integers from `low` to `high`; all 0 if the scale is not
// positive.
void round_numbers(float low, float high, Group& group) {
  constexpr float ROUND = 12582912.0f;  // leaves the integer in the lowest bits of the sum
  const float scale = group.scale, offset = group.offset;
  if (!(scale > 0)) {
    std::memset(group.numbers, 0, sizeof(group.numbers));
    return;
  }
  float sums[GROUP];
  for (int k = 0; k < GROUP; k++) {
    float number = (group.values[k] - offset) / scale;
    number = number < low ? low : number;
    number = number > high ? high : number;
    sums[k] = number + ROUND;
  }
  uint32_t bits[GROUP];
  std::memcpy(bits, sums, sizeof(bits));
  for (int k = 0; k < GROUP; k++) group.numbers[k] = int8_t(bits[k]);
}

// The least and the largest of the values; NaN if one is not finite, so that the group becomes NaN.
// By fours, which every machine has.
void find_range(const float* values, float& low, float& high) {
  v4f lows = load<v4f>(values), highs = lows, check = lows * 0.0f;
  for (int k = 4; k < GROUP; k += 4) {
    const v4f v = load<v4f>(values + k);
    lows = v < lows ? v : lows;
    highs = v > highs ? v : highs;
    check += v * 0.0f;
  }
  low = lows[0];
  high = highs[0];
  float sum = check[0];
  for (int lane = 1; lane < 4; lane++) {
    low = lows[lane] < low ? lows[lane] : low;
    high = highs[lane] > high ? highs[lane] : high;
    sum += check[lane];
  }
  low += sum;
  high += sum;
}

void quantize(int format, Group& group) {
  float low, high;
  find_range(group.values, low, high);
  if (format == HW_INT8) {
    group.scale = from_half(to_half(std::fmax(-low, high) / 127.0f));
    group.offset = 0.0f;
    round_numbers(-127.0f, 127.0f, group);
  } else {
    group.scale = from_half(to_half((high - low) / 15.0f));
    group.offset = from_half(to_half(low));
    round_numbers(0.0f, 15.0f, group);
  }
}

void read_column(const uint8_t* from, int source, int part, int format, int column, Tile& tile) {
  Group group;
  const bool is_ready = read_group(from, source, part, format, group);
  if (format == HW_BF16) {
    for (int k = 0; k < GROUP; k++) tile.bfloats[column][k] = to_bfloat(group.values[k]);
    return;
  }
  if (!is_ready) quantize(format, group);
  std::memcpy(tile.numbers[column], group.numbers, GROUP);
  tile.scales[column] = to_half(group.scale);
  tile.offsets[column] = to_half(group.offset);
}

// Moves the bytes at even places to the low half, the others to the high half.
uint64_t by_parity(uint64_t bytes) {
  const auto gather = [](uint64_t even) {
    even &= 0x00ff00ff00ff00ff;
    even = (even | even >> 8) & 0x0000ffff0000ffff;
    return (even | even >> 16) & 0xffffffff;
  };
  return gather(bytes) | gather(bytes >> 8) << 32;
}

void write_tile(const Tile& tile, int format, uint8_t* to) {
  if (format == HW_BF16) {
    for (int pair = 0; pair < GROUP / 2; pair++) {
      for (int column = 0; column < TILE; column++) {
        std::memcpy(to + pair * 64 + column * 4, &tile.bfloats[column][pair * 2], 4);
      }
    }
    return;
  }
  std::memcpy(to, tile.scales, sizeof(tile.scales));
  if (format == HW_INT8) {
    for (int pair = 0; pair < GROUP / 2; pair++) {
      for (int column = 0; column < TILE; column++) {
        std::memcpy(to + 32 + pair * 32 + column * 2, &tile.numbers[column][pair * 2], 2);
      }
    }
    return;
  }
  std::memcpy(to + 32, tile.offsets, sizeof(tile.offsets));
  // Columns c and c + 8 share a byte. 64 bytes hold eight inputs; of each column those of even
  // number come first.
  for (int column = 0; column < TILE / 2; column++) {
    uint8_t bytes[GROUP];
    for (int k = 0; k < GROUP; k++) {
      bytes[k] = uint8_t(tile.numbers[column][k] | tile.numbers[column + 8][k] << 4);
    }
    for (int eight = 0; eight < GROUP / 8; eight++) {
      uint64_t inputs;
      std::memcpy(&inputs, bytes + eight * 8, 8);
      inputs = by_parity(inputs);
      std::memcpy(to + 64 + eight * 64 + column * 8, &inputs, 8);
    }
  }
}

}  // namespace
}  // namespace headway

HW_API int64_t hw_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
  return (num_outputs + headway::TILE - 1) / headway::TILE *
         headway::panel_bytes(format, num_inputs);
}

HW_API void hw_pack(uint8_t* target, int32_t format, const HwRows* rows, int64_t first_panel,
                    int64_t panel_step) {
  using namespace headway;
  const Block block = block_of(rows->source);
  const int64_t num_groups = rows->num_inputs / GROUP, per_block = block.num_weights / GROUP;
  const int64_t row_bytes = rows->num_inputs / block.num_weights * block.num_bytes;
  Tile tile = {};
  for (int64_t row = 0; row < rows->num_rows; row += TILE) {
    const int64_t panel = first_panel + row / TILE * panel_step;
    const int64_t left = rows->num_rows - row, count = left < TILE ? left : TILE;
    uint8_t* to = target + panel * panel_bytes(format, rows->num_inputs);
    for (int64_t g = 0; g < num_groups; g++) {
      for (int column = 0; column < count; column++) {
        const uint8_t* from =
            rows->data + (row + column) * row_bytes + g / per_block * block.num_bytes;
        __builtin_prefetch(from + AHEAD_BYTES);
        read_column(from, rows->source, int(g % per_block), format, column, tile);
      }
      write_tile(tile, format, to + g * group_bytes(format));
    }
  }
}

HW_API void hw_unpack(const HwLinear* linear, int32_t output, float* target) {
  headway::plain_ops()->embed(*linear, output, target);
}
