// Operations compiled once per instruction set. One thread runs each call on one item.

#pragma once

#include "headway.h"

namespace headway {

using bf16 = uint16_t;

constexpr int TILE = 16;   // rows or columns of a matrix tile; tokens of a KV tile
constexpr int GROUP = 32;  // inputs that share a scale
constexpr int MAX_HEAD_DIM = 128;
constexpr int CHUNK = 64;  // logits that are summed together
constexpr int NUM_BOUNDS = 4;

enum class Epilogue { Store, Add, SiluMul, Best };

// Int8 activations of 32 inputs, in the order of the bytes of unpacked weights.
struct Int8Group {
  int8_t values[GROUP];
  float scale;
  float sum;  // of the values times the scale
};

// A product of activations with panels of a linear layer, and its epilogue.
struct Product {
  const bf16* inputs;       // [rows][num_inputs], readable up to a multiple of 16 rows
  const Int8Group* groups;  // the inputs in int8: [rows][num_inputs / 32]
  int num_rows;
  const HwLinear* linear;
  Epilogue epilogue;
  float* out;      // Store, Add, Best: [rows][out_stride]
  bf16* out_bf16;  // SiluMul
  int64_t out_stride;
  float* best;  // Best: 16 maxima and 16 checks of each row, of the calling thread
  int32_t* best_ids;
  int num_out_rows;      // Best: the first rows, whose sums are stored
  const int64_t* masks;  // Best: of each row; those of the first rows are not applied. May be null
};

// Queries of one request that share a KV head, over the context of the request.
struct Attention {
  const bf16* queries;  // [rows][head_dim]; row = token * group_size + head within the group
  int num_rows;         // at most 16
  int first_row;        // of the span, so that row r belongs to token (first_row + r) / group_size
  int group_size;
  int head_dim;
  int start;            // position of the first token of the span
  int window;           // 0: none
  const uint8_t* kv;    // blocks of this layer
  int64_t block_bytes;  // of one block of this layer, all heads
  int64_t head_offset;  // of this head's keys within a block
  const int32_t* blocks;
  int block_size;
  int kv_format;
  bf16* out;  // output of row r: out + token * out_stride + head * head_dim
  int64_t out_stride;
};

// The probs of a row, and sum and maximum of each chunk of them.
struct Probs {
  double* probs;
  double* sums;
  double* tops;
};

// Number and sum of some probs.
struct Share {
  int64_t count;
  double sum;
};

struct Ops {
  // Columns 32 * item ... of a product; `scratch` holds product_scratch() bytes.
  void (*multiply)(const Product&, int item, uint8_t* scratch);
  void (*multiply_int8)(const Product&, int item, uint8_t* scratch);
  // `scratch` holds attention_scratch() bytes.
  void (*attend)(const Attention&, uint8_t* scratch);
  void (*norm)(const float* x, const float* weight, float eps, int size, bf16* out);
  // In place, for one head: norm if `weight` is set, then rotate.
  void (*norm_rotate)(float* x, const float* weight, float eps, const float* cosines,
                      const float* sines, int head_dim);
  void (*to_bf16)(const float* x, int size, bf16* out);
  // Quantizes a row of activations for weights of a format.
  void (*quantize_row)(const bf16* from, int64_t width, int weight_format, Int8Group* to);
  // Writes key and value of one token and head into their tiles, and adds them to NUM_SUMS sums.
  void (*write_kv)(const float* key, const float* value, int offset, int head_dim, int format,
                   uint8_t* key_tile, uint8_t* value_tile, uint64_t* sums);
  // Adds key and value of one token and head to the sums, as write_kv did.
  void (*sum_kv)(const uint8_t* key_tile, const uint8_t* value_tile, int offset, int head_dim,
                 int format, uint64_t* sums);
  // Zeroes the values of a bf16 tile from token `from` on.
  void (*clear_values)(int from, int head_dim, uint8_t* value_tile);
  void (*embed)(const HwLinear&, int token_id, float* out);
  void (*thread_end)();  // once per thread and step

  // Writes the prob of each logit, and sum and maximum of each chunk; returns the sum of all.
  double (*softmax_row)(const float* logits, int size, double best, double factor, const Probs&);
  // Sums the probs of at least each of NUM_BOUNDS rising bounds.
  void (*sum_at_least)(const Probs&, int size, const double* bounds, Share* shares);
  // Writes the sum of the probs above `bound` of each chunk, and the ids of the equal ones in
  // order; returns the sum of all above.
  double (*sum_chunks_above)(const Probs&, int size, double bound, double* sums, int32_t* equal_ids,
                             int* num_equal);
  // Copies the probs from `low` to below `high`; returns their number. Writes up to 8 more.
  int (*copy_between)(const Probs&, int size, double low, double high, double* values);
  // Returns the sum of exp(logit - best); writes the maximum of each chunk of logits.
  double (*sum_exp)(const float* logits, int size, float best, float* tops);
  // Lists the ids of logits of at least `bound`, in order; returns their number.
  int (*list_at_least)(const float* logits, const float* tops, int size, float bound, int32_t* ids);
  int (*count_above)(const float* logits, int size, float value);
  // Copies logits; those of tokens without their bit in the mask become -infinity.
  void (*mask_row)(const float* logits, const uint32_t* mask, int size, float* out);
  // Returns the id of the largest logit, the lowest of equal ones.
  int (*find_best)(const float* logits, int size);
};

// Bytes of the keys (or values) of 16 tokens of one head.
inline int64_t kv_tile_bytes(int format, int head_dim) {
  return format == HW_INT8 ? int64_t{TILE} * head_dim + TILE * 4 : int64_t{TILE} * head_dim * 2;
}

inline int64_t group_bytes(int format) {
  switch (format) {
    case HW_INT8:
      return 32 + 512;
    case HW_INT4:
      return 64 + 256;
    default:
      return 1024;
  }
}

inline int64_t panel_bytes(int format, int64_t num_inputs) {
  return num_inputs / GROUP * group_bytes(format);
}

// Inputs of a panel that are unpacked at a time, to bf16 or to fp32.
constexpr int64_t PANEL_CHUNK = 576;
constexpr int64_t FP32_CHUNK = 288;
constexpr int64_t MAX_FP32_ROWS = 12;

constexpr int64_t OPENED_BYTES = 2 * PANEL_CHUNK * TILE * 2;  // of two unpacked pieces

// Two unpacked pieces, rows of inputs as fp32, and a sum for each row and column.
inline int64_t product_scratch(int64_t num_rows) {
  return OPENED_BYTES + MAX_FP32_ROWS * FP32_CHUNK * 4 + (num_rows + 2 * TILE) * 32 * 4;
}

// Scores in fp32 and their exponentials in bf16, for 16 rows over the whole context.
inline int64_t attention_scratch(int64_t max_positions, int head_dim) {
  int64_t padded = (max_positions + TILE - 1) / TILE * TILE + TILE;
  return TILE * padded * 6 + TILE * int64_t{head_dim} * 8 + 4096;
}

const Ops* plain_ops();
#if defined(__x86_64__)
const Ops* avx2_ops();
const Ops* avx512_ops();
const Ops* avx512_vnni_ops();
const Ops* amx_ops();
#endif

}  // namespace headway
