// The C interface of the compiled kernels, called from Python through ctypes.
//
// One call runs one whole step: every layer of a decoder over the tokens of every scheduled
// request, on the blocks of the KV store. After the largest step so far, no step allocates memory.
// Nothing depends on torch.
//
// Arithmetic: the residual stream, norms, softmax and accumulation are fp32; inputs of matrix
// products are bf16, or bf16 quantized to int8 in groups of 32. The result of a row depends only on
// its own inputs: not on other rows, not on the chunks of a prompt, not on the number of threads.

#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define HW_API extern "C" __attribute__((visibility("default")))
#endif

// Increment on every change below; Python refuses a library of another version.
constexpr int32_t HW_ABI_VERSION = 9;

// Formats of the weights of a linear layer. Weights are divided into panels of 16 outputs, and a
// panel into groups of 32 inputs. Within a group, inputs are in pairs, the layout of matrix
// instructions: [group][pair][output][2].
enum HwFormat : int32_t {
  HW_BF16 = 0,  // 64 bytes per pair of inputs
  HW_INT8 = 1,  // group: 16 fp16 scales, then 16 pairs of 32 bytes
  HW_INT4 = 2,  // group: 16 fp16 scales, 16 fp16 offsets, then 4 times 4 pairs of 16 bytes
};

enum HwIsa : int32_t {
  HW_PLAIN = 0,
  HW_AVX2 = 1,
  HW_AVX512 = 2,
  HW_AVX512_VNNI = 3,
  HW_AMX = 4,
};

enum HwStatus : int32_t {
  HW_DONE = 0,
  HW_NO_MEMORY = 1,
  HW_MISFIT = 2,      // the model has other shapes, or the machine lacks the instruction set
  HW_NO_THREADS = 3,  // the system refused to start a thread
};

// Formats of rows to pack: numbers, or blocks of 32 or 256 as in GGUF files.
enum HwSource : int32_t {
  HW_FROM_F32 = 0,
  HW_FROM_F16 = 1,
  HW_FROM_BF16 = 2,
  HW_FROM_Q4_0 = 3,
  HW_FROM_Q4_1 = 4,
  HW_FROM_Q5_0 = 5,
  HW_FROM_Q5_1 = 6,
  HW_FROM_Q8_0 = 7,
  HW_FROM_Q4_K = 8,
  HW_FROM_Q5_K = 9,
  HW_FROM_Q6_K = 10,
};

// Rows to pack; `num_inputs` is a multiple of the block of `source`.
struct HwRows {
  const uint8_t* data;
  int64_t num_rows;
  int64_t num_inputs;
  int32_t source;
  int32_t unused;
};

struct HwLinear {
  const uint8_t* data;
  const float* bias;  // may be null
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t format;
  int32_t unused;
};

struct HwLayer {
  const float* attention_norm;
  const float* q_norm;  // null without QK norm
  const float* k_norm;
  const float* mlp_norm;
  HwLinear qkv;
  HwLinear o;
  HwLinear gate_up;  // panels of gate and up alternate
  HwLinear down;
  int32_t window;  // 0: none
  int32_t unused;
};

struct HwModel {
  int32_t hidden_size;
  int32_t inner_size;
  int32_t num_layers;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t vocab_size;
  int32_t max_positions;
  float norm_eps;
  int32_t kv_format;  // HW_BF16 or HW_INT8
  int32_t block_size;
  int32_t num_blocks;
  int32_t activation_format;  // HW_BF16, or HW_INT8 for products with int8 or int4 weights
  int32_t unused;
  const HwLayer* layers;
  HwLinear embedding;
  HwLinear head;
  const float* final_norm;
  const float* cosines;  // [max_positions][head_dim / 2]
  const float* sines;
  uint8_t* kv;  // [layer][block][kv head][keys, values][tile of 16 tokens]
};

constexpr int32_t HW_MAX_LOGPROBS = 20;

// How to choose the token of one row. Changes of the logits apply in this order: mask, banned ids,
// biases, penalties; then filters in this order: min_p, top_k, top_p. Ids outside the vocabulary
// are skipped.
struct HwSampling {
  double draw;         // a uniform number in [0, 1)
  double temperature;  // 0: the best token
  double top_p;        // 1: no limit
  double min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t top_k;         // 0: no limit
  int32_t num_logprobs;  // log-probabilities of the likeliest tokens; -1: none at all
  int32_t num_banned;
  int32_t num_biases;
  int32_t num_seen;
  const int32_t* banned_ids;
  const int32_t* bias_ids;
  const float* biases;
  const int32_t* seen_ids;     // tokens of the prompt and the output, each once
  const float* output_counts;  // of each seen id: how often the output has it
};

// Log-probabilities of one row, by the model's own logits, before the mask and all changes.
struct HwLogprobs {
  float logprob;  // of the chosen token
  int32_t rank;   // of the chosen token, from 1
  int32_t top_ids[HW_MAX_LOGPROBS];
  float top_logprobs[HW_MAX_LOGPROBS];
};

// A token of a prompt whose successor is scored by the logits of this token.
struct HwScored {
  int32_t row;      // of the token, as in HwStep::rows
  int32_t next_id;  // the token that follows it
  int32_t num_top;  // log-probabilities of the likeliest tokens
};

struct HwStep {
  int32_t num_spans;
  int32_t num_tokens;
  int32_t num_rows;     // tokens that need logits
  int32_t num_sampled;  // the first rows, which have a sampling; the best token of other rows wins
  const int32_t* token_ids;     // of all spans, concatenated
  const int32_t* starts;        // of each span: position of its first token
  const int32_t* lengths;       // of each span
  const int64_t* block_tables;  // of each span: address of its int32 block ids
  const int32_t* rows;
  const HwSampling* samplings;  // [num_sampled]
  float* logits;                // [num_rows][vocab_size], or null if they are not wanted
  int32_t* chosen_ids;          // [num_rows]
  float* best;           // [num_rows]: the best logit; not finite if the row cannot be sampled
  HwLogprobs* logprobs;  // [num_sampled]
  // [num_rows]: address of the token mask of each row, or 0 for every token; null without masks.
  // A mask has a bit per token in uint32 words, lowest bit first; a token without it is impossible.
  const int64_t* masks;
  // Another thread is writing the masks until it calls hw_set_ready; null if they are written.
  int32_t* masks_ready;
  const HwScored* scored;  // [num_scored]
  HwLogprobs* scores;      // [num_scored]: of the next tokens; NaN if a logit is not finite
  int32_t num_scored;
  int32_t num_hidden;
  const int32_t* hidden_rows;  // [num_hidden]: tokens whose last hidden state is wanted
  float* hidden;               // [num_hidden][hidden_size], after the final norm
};

// Parts of a step for the profile, in seconds over steps; see PARTS in kernels.py.
enum HwPart { HW_LINEAR, HW_ATTENTION, HW_NORM_ROPE, HW_HEAD, HW_SAMPLING, HW_WAIT, HW_NUM_PARTS };

HW_API int32_t hw_abi_version();
// Returns the best instruction set of this machine, an HwIsa.
HW_API int32_t hw_best_isa();
HW_API int64_t hw_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs);
HW_API int64_t hw_block_bytes(const HwModel* model);  // in one layer
// Packs rows into a layer of format `format`: each 16 rows into a panel, from `first_panel` on by
// steps of `panel_step`. Threads may pack different panels at the same time.
HW_API void hw_pack(uint8_t* target, int32_t format, const HwRows* rows, int64_t first_panel,
                    int64_t panel_step);
// Unpacks the weights of one output as fp32, for tests.
HW_API void hw_unpack(const HwLinear* linear, int32_t output, float* target);
// Sets `engine` if the status is HW_DONE. The model's arrays must outlive the engine.
HW_API int32_t hw_create(const HwModel* model, int32_t isa, int32_t num_threads, void** engine);
HW_API void hw_destroy(void* engine);
// Returns HW_DONE or HW_NO_MEMORY, as hw_copy_blocks does.
HW_API int32_t hw_step(void* engine, const HwStep* step);
// Says that the masks of a step are written; the flag was 0 when the step began.
HW_API void hw_set_ready(int32_t* flag);
// Chooses a token from one row of finite logits, for tests. `mask` may be null. Returns HW_DONE,
// HW_NO_MEMORY or HW_MISFIT.
HW_API int32_t hw_sample(int32_t isa, const HwSampling* sampling, const uint32_t* mask,
                         float* logits, int32_t vocab_size, int32_t* chosen_id, float* best,
                         HwLogprobs* logprobs);
HW_API int32_t hw_copy_blocks(void* engine, const int32_t* sources, const int32_t* targets,
                              int32_t count);
// Writes a checksum of the first tokens of each block, over all layers. Reads a block only if its
// tokens were not all written by steps of this engine.
HW_API void hw_checksum_blocks(void* engine, const int32_t* block_ids, const int32_t* num_tokens,
                               int32_t count, uint64_t* checksums);
// Has the next checksum of each block read it, because others than steps have written it.
HW_API void hw_forget_blocks(void* engine, const int32_t* block_ids, int32_t count);
// Clears what is behind the first tokens of each block and could be read as not finite.
HW_API void hw_clear_tails(void* engine, const int32_t* block_ids, const int32_t* num_tokens,
                           int32_t count);
// Writes the seconds of each part on the calling thread since the last call.
HW_API void hw_profile(void* engine, double* seconds);
