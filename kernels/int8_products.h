// Products of int8 activations with packed weights. Compiled once per instruction set.
//
// Weights are unsigned bytes: 4-bit weights as they are, int8 weights plus 128, with an offset to
// match. The products of a group of 32 inputs are summed in int32, without rounding; the groups
// are added in fp32 in the order of the inputs. So a row has the same result in every batch.

#pragma once

#include "ops.h"
#include "products.h"
#include "vec.h"
#include "weights.h"

namespace {

using namespace headway;

// A group of a panel as bytes: [8 times 4 inputs][16 outputs][4].
struct alignas(64) ByteGroup {
  uint8_t bytes[GROUP * TILE];
  float scales[TILE];
  float offsets[TILE];
};

constexpr int64_t BYTE_CHUNK = 16;  // groups that are unpacked at a time
static_assert(2 * BYTE_CHUNK * sizeof(ByteGroup) <= OPENED_BYTES);

// As many rows as have their sums in registers, those of bytes and those in fp32.
#if defined(__AVX512VNNI__)
template <bool IS_INT4>
constexpr int MAX_BYTE_ROWS = 6;
#elif defined(__AVX512BW__)
template <bool IS_INT4>
constexpr int MAX_BYTE_ROWS = IS_INT4 ? 6 : 4;
#else
template <bool IS_INT4>
constexpr int MAX_BYTE_ROWS = 2;
#endif

// Quantizes a row for the weights of a format. A group that is not finite has a scale of NaN.
void quantize_row(const bf16* from, int64_t width, int weight_format, Int8Group* to) {
  for (int64_t g = 0; g < width / GROUP; g++) {
    alignas(64) float x[GROUP];
    widen_bf16(from + g * GROUP, GROUP, x);
    const v16f a = loadf(x), b = loadf(x + 16);
    const float top = hmax(maximum(a < 0.0f ? -a : a, b < 0.0f ? -b : b));
    const float check = hsum((a + b) * 0.0f);
    const float factor = top > 0.0f ? 127.0f / top : 0.0f;
    const v16f low = (a * factor + 12582912.0f) - 12582912.0f;
    const v16f high = (b * factor + 12582912.0f) - 12582912.0f;
    const float scale = top / 127.0f + check;
    to[g].scale = scale;
    to[g].sum = hsum(low + high) * scale;
    // As the bytes of 4-bit weights are unpacked.
    store_i8(to[g].values, low, high, weight_format == HW_INT4);
  }
}

inline void to_bytes(const uint8_t* from, int format, ByteGroup& to) {
  const v16f scale = from_fp16(from);
  store(to.scales, scale);
  if (format == HW_INT8) {
    store(to.offsets, scale * -128.0f);
    for (int four = 0; four < 8; four++) {
      const v32h pairs = load<v32h>(from + 32 + four * 64);
      const v32h bytes = interleave_halves(pairs);
      store(to.bytes + four * 64, (v16u)bytes ^ 0x80808080u);
    }
    return;
  }
  store(to.offsets, from_fp16(from + 32));
  for (int eight = 0; eight < 4; eight++) {
    const v16u bits = load<v16u>(from + 64 + eight * 64);
    // Outputs 0 - 7 and 8 - 15; the even inputs of an output are beside the odd ones.
    const v16u low = bits & 0x0f0f0f0fu, high = (bits >> 4) & 0x0f0f0f0fu;
    store(to.bytes + eight * 128, even_lanes(low, high));
    store(to.bytes + eight * 128 + 64, odd_lanes(low, high));
  }
}

// Adds groups of inputs to the sums of R rows with two panels; clears the sums first if `is_first`.
// `weights(g, panels)` sets the weights of group g of each panel.
template <bool IS_INT4, int R, typename Weights>
void multiply_groups(const Int8Group* inputs, int64_t stride, int64_t num_groups, bool is_first,
                     float* sums, const Weights& weights) {
  constexpr int STRIPS = 2 * TILE / LANES, PER_PANEL = TILE / LANES;
  vf sum[R][STRIPS];
  for (int r = 0; r < R; r++) {
    for (int s = 0; s < STRIPS; s++) {
      sum[r][s] = is_first ? vf{} : load<vf>(sums + r * 32 + s * LANES);
    }
  }
  for (int64_t g = 0; g < num_groups; g++) {
    const ByteGroup* panels[2];
    weights(g, panels);
    ByteSums<IS_INT4> dots[R][STRIPS];
#pragma GCC unroll 8
    for (int four = 0; four < 8; four++) {
      const auto strip = [&](int s) {
        return ByteWeights<IS_INT4>(panels[s / PER_PANEL]->bytes + four * 64 +
                                    s % PER_PANEL * LANES * 4);
      };
      const auto add = [&](int s, const ByteWeights<IS_INT4>& first,
                           const ByteWeights<IS_INT4>& second) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t values;
          memcpy(&values, inputs[r * stride + g].values + four * 4, 4);
          dots[r][s].add(first, values);
          dots[r][s + 1].add(second, values);
        }
      };
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; s += 2) add(s, strip(s), strip(s + 1));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Int8Group& group = inputs[r * stride + g];
#pragma GCC unroll 4
      for (int s = 0; s < STRIPS; s++) {
        const ByteGroup& panel = *panels[s / PER_PANEL];
        const int at = s % PER_PANEL * LANES;
        const vf scale = load<vf>(panel.scales + at) * group.scale;
        sum[r][s] += __builtin_convertvector(dots[r][s].total(), vf) * scale;
        sum[r][s] += load<vf>(panel.offsets + at) * group.sum;
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int s = 0; s < STRIPS; s++) store(sums + r * 32 + s * LANES, sum[r][s]);
  }
}

template <bool IS_INT4, int R, typename Weights>
inline void multiply_group_rows(int num_rows, const Int8Group* inputs, int64_t stride,
                                int64_t num_groups, bool is_first, float* sums,
                                const Weights& weights) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      multiply_group_rows<IS_INT4, R - 1>(num_rows, inputs, stride, num_groups, is_first, sums,
                                          weights);
      return;
    }
  }
  multiply_groups<IS_INT4, R>(inputs, stride, num_groups, is_first, sums, weights);
}

template <bool IS_INT4>
void multiply_bytes(const Product& p, int item, uint8_t* scratch) {
  constexpr int most_rows = MAX_BYTE_ROWS<IS_INT4>, format = IS_INT4 ? HW_INT4 : HW_INT8;
  const bool has_second = item * 2 + 1 < p.linear->num_outputs / TILE;
  const int64_t width = p.linear->num_inputs / GROUP, bytes = group_bytes(format);
  const uint8_t* first = p.linear->data + 2 * item * width * bytes;
  const uint8_t* second = has_second ? first + width * bytes : first;
  float* sums = (float*)(scratch + OPENED_BYTES);
  if (p.num_rows <= most_rows) {
    // A weight is used once, directly after it is unpacked.
    ByteGroup ring[2][2];
    const auto weights = [&](int64_t g, const ByteGroup** panels) {
      // Panels are contiguous, and so are the items of a thread.
      prefetch(first + g * bytes + PREFETCH_BYTES, bytes);
      prefetch(second + g * bytes + PREFETCH_BYTES, bytes);
      to_bytes(first + g * bytes, format, ring[g % 2][0]);
      to_bytes(second + g * bytes, format, ring[g % 2][1]);
      panels[0] = &ring[g % 2][0];
      panels[1] = &ring[g % 2][1];
    };
    multiply_group_rows<IS_INT4, most_rows>(p.num_rows, p.groups, width, width, true, sums,
                                            weights);
  } else {
    ByteGroup* opened = (ByteGroup*)scratch;
    const int num_blocks = (p.num_rows + most_rows - 1) / most_rows;
    for (int64_t from = 0; from < width; from += BYTE_CHUNK) {
      const int64_t count = width - from < BYTE_CHUNK ? width - from : BYTE_CHUNK;
      for (int64_t g = 0; g < count; g++) {
        to_bytes(first + (from + g) * bytes, format, opened[g]);
        to_bytes(second + (from + g) * bytes, format, opened[BYTE_CHUNK + g]);
      }
      const auto weights = [&](int64_t g, const ByteGroup** panels) {
        panels[0] = opened + g;
        panels[1] = opened + BYTE_CHUNK + g;
      };
      for (int block = 0; block < num_blocks; block++) {
        const int row = p.num_rows * block / num_blocks;
        const int num_rows = p.num_rows * (block + 1) / num_blocks - row;
        multiply_group_rows<IS_INT4, most_rows>(num_rows, p.groups + row * width + from, width,
                                                count, from == 0, sums + row * 32, weights);
      }
    }
  }
  for (int r = 0; r < p.num_rows; r++) {
    finish(p, item, r, loadf(sums + r * 32), loadf(sums + r * 32 + 16), has_second);
  }
}

// As `multiply`, with the inputs in `groups`.
void multiply_int8(const Product& p, int item, uint8_t* scratch) {
  if (p.linear->format == HW_INT4)
    multiply_bytes<true>(p, item, scratch);
  else
    multiply_bytes<false>(p, item, scratch);
}

}  // namespace
