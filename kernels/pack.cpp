// Packs weights: from rows of checkpoints to panels of products.

#include <cmath>
#include <cstring>

#include "ops.h"

namespace headway {
namespace {

float from_half(uint16_t h) {
  uint32_t bits = uint32_t(h & 0x7fff) << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  if ((h & 0x7c00) == 0x7c00) f = h & 0x3ff ? NAN : INFINITY;
  return h & 0x8000 ? -f : f;
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
  if (f != f) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 32 weights of one output: integers times a scale plus an offset, or values.
struct Group {
  float values[GROUP];
  uint8_t numbers[GROUP];
  uint16_t scale;
  uint16_t offset;
};

int64_t source_bytes(int source) {
  switch (source) {
    case HW_Q4_0:
      return 18;
    case HW_Q4_1:
      return 20;
    case HW_Q8_0:
      return 34;
    default:
      return GROUP * 4;
  }
}

// Reads a group; returns true if its integers already fit `format`.
bool read_group(const uint8_t* from, int source, int format, Group& group) {
  if (source == HW_F32) {
    std::memcpy(group.values, from, GROUP * 4);
    return false;
  }
  std::memcpy(&group.scale, from, 2);
  const float scale = from_half(group.scale);
  if (source == HW_Q8_0) {
    std::memcpy(group.numbers, from + 2, GROUP);
    if (format == HW_INT8) return true;
    for (int k = 0; k < GROUP; k++) group.values[k] = scale * float(int8_t(from[2 + k]));
    return false;
  }
  const uint8_t* nibbles = from + (source == HW_Q4_1 ? 4 : 2);
  if (source == HW_Q4_1)
    std::memcpy(&group.offset, from + 2, 2);
  else
    group.offset = to_half(-8.0f * scale);
  for (int k = 0; k < 16; k++) {
    group.numbers[k] = nibbles[k] & 15;
    group.numbers[k + 16] = nibbles[k] >> 4;
  }
  if (format == HW_INT4) return true;
  const float offset = from_half(group.offset);
  for (int k = 0; k < GROUP; k++) group.values[k] = scale * float(group.numbers[k]) + offset;
  return false;
}

void quantize(int format, Group& group) {
  float low = group.values[0], high = group.values[0];
  float check = 0.0f;
  for (float v : group.values) {
    low = v < low ? v : low;
    high = v > high ? v : high;
    check += v * 0.0f;
  }
  low += check;  // NaN if a weight is not finite, so that the group becomes NaN
  high += check;
  if (format == HW_INT8) {
    group.scale = to_half(std::fmax(std::fabs(low), std::fabs(high)) / 127.0f);
    const float scale = from_half(group.scale);
    for (int k = 0; k < GROUP; k++) {
      const float number = scale > 0 ? std::nearbyint(group.values[k] / scale) : 0.0f;
      group.numbers[k] = uint8_t(int8_t(std::fmin(127.0f, std::fmax(-127.0f, number))));
    }
    return;
  }
  group.scale = to_half((high - low) / 15.0f);
  group.offset = to_half(low);
  const float scale = from_half(group.scale), offset = from_half(group.offset);
  for (int k = 0; k < GROUP; k++) {
    const float number = scale > 0 ? std::nearbyint((group.values[k] - offset) / scale) : 0.0f;
    group.numbers[k] = uint8_t(std::fmin(15.0f, std::fmax(0.0f, number)));
  }
}

void write_group(uint8_t* to, int format, int column, const Group& group) {
  if (format == HW_BF16) {
    for (int k = 0; k < GROUP; k++) {
      const uint16_t value = to_bfloat(group.values[k]);
      std::memcpy(to + k / 2 * 64 + column * 4 + k % 2 * 2, &value, 2);
    }
    return;
  }
  std::memcpy(to + column * 2, &group.scale, 2);
  if (format == HW_INT8) {
    for (int k = 0; k < GROUP; k++) to[32 + k / 2 * 32 + column * 2 + k % 2] = group.numbers[k];
    return;
  }
  std::memcpy(to + 32 + column * 2, &group.offset, 2);
  for (int k = 0; k < GROUP; k++) {
    // Four pairs of inputs share 64 bytes: lane L of pair P is half of a byte of number L % 16.
    const int pair = k / 2, lane = column * 2 + k % 2;
    uint8_t& byte = to[64 + pair / 4 * 64 + lane % 16 * 4 + pair % 4];
    const uint8_t number = group.numbers[k];
    byte = lane < 16 ? uint8_t((byte & 0xf0) | number) : uint8_t((byte & 0x0f) | number << 4);
  }
}

}  // namespace
}  // namespace headway

HW_API int64_t hw_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
  return (num_outputs + headway::TILE - 1) / headway::TILE *
         headway::panel_bytes(format, num_inputs);
}

HW_API void hw_pack(uint8_t* target, int32_t format, int32_t source, const void* rows,
                    int64_t num_rows, int64_t num_inputs, const int32_t* outputs) {
  using namespace headway;
  const int64_t num_groups = num_inputs / GROUP, bytes = source_bytes(source);
  const uint8_t* from = static_cast<const uint8_t*>(rows);
  Group group;
  for (int64_t row = 0; row < num_rows; row++) {
    uint8_t* panel = target + outputs[row] / TILE * panel_bytes(format, num_inputs);
    for (int64_t g = 0; g < num_groups; g++) {
      const bool is_ready =
          read_group(from + (row * num_groups + g) * bytes, source, format, group);
      if (!is_ready && format != HW_BF16) quantize(format, group);
      write_group(panel + g * group_bytes(format), format, outputs[row] % TILE, group);
    }
  }
}

HW_API void hw_unpack(const HwLinear* linear, int32_t output, float* target) {
  headway::plain_ops()->embed(*linear, output, target);
}
