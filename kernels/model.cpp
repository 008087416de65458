// The forward pass: order of the operations, and their division over threads.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "block_sums.h"
#include "memory.h"
#include "ops.h"
#include "pool.h"
#include "sample.h"

namespace headway {
namespace {

struct AttentionItem {
  int32_t span;
  int32_t kv_head;
  int32_t first_row;
  int32_t num_rows;
};

// Rows of logits that are scored at a time: those of a whole prompt could fill the memory.
constexpr int SCORED_ROWS = 64;

// Rows of the head's product: tokens, where their logits go, and their masks.
struct HeadRows {
  int count;
  float* logits;
  int64_t stride;
  int num_stored;        // the first rows, whose logits are stored
  const int64_t* masks;  // of the other rows; may be null
};

// The best logit of a row; NaN if one is not finite.
struct BestLogit {
  int32_t id;
  float value;
};

// The phase that a thread is in: the first counter counts the items done, the others those taken.
struct Phase {
  int index = 0;
  int count = 0;
  Counter* counters = nullptr;
};

class Engine {
 public:
  Engine(const HwModel& model, const Ops* ops, int num_threads)
      : model_(model),
        ops_(ops),
        pool_(num_threads),
        q_size_(model.num_heads * model.head_dim),
        kv_size_(model.num_kv_heads * model.head_dim),
        group_size_(model.num_heads / model.num_kv_heads),
        head_bytes_(2 * (model.block_size / TILE) * kv_tile_bytes(model.kv_format, model.head_dim)),
        block_bytes_(model.num_kv_heads * head_bytes_),
        layer_bytes_(block_bytes_ * model.num_blocks),
        products_(num_threads),
        attention_(num_threads),
        best_(num_threads),
        best_ids_(num_threads),
        samplers_(num_threads),
        block_sums_(model.num_blocks) {
    for (int t = 0; t < num_threads; t++) {
      attention_[t].reserve(attention_scratch(model.max_positions, model.head_dim));
    }
  }

  void step(const HwStep& step) {
    step_ = &step;
    prepare();
    for (int i = 0; i < num_counters_; i++) counters_[i].next.store(0, std::memory_order_relaxed);
    pool_.run([this](int thread) { run(thread); });
    for (int t = 0; t < step.num_tokens; t++) {
      const int32_t block_id = table(span_of_[t])[places_[t] / model_.block_size];
      block_sums_.add_token(block_id, places_[t] % model_.block_size, token_sums(t));
    }
  }

  void copy_blocks(const int32_t* sources, const int32_t* targets, int count) {
    // Every source is read before any target is written.
    staging_.reserve(block_bytes_ * count);
    for (int layer = 0; layer < model_.num_layers; layer++) {
      uint8_t* blocks = model_.kv + layer * layer_bytes_;
      for (int i = 0; i < count; i++) {
        std::memcpy(staging_.get() + i * block_bytes_, blocks + sources[i] * block_bytes_,
                    block_bytes_);
      }
      for (int i = 0; i < count; i++) {
        std::memcpy(blocks + targets[i] * block_bytes_, staging_.get() + i * block_bytes_,
                    block_bytes_);
      }
    }
    forget_blocks(targets, count);
  }

  void forget_blocks(const int32_t* block_ids, int count) {
    for (int i = 0; i < count; i++) block_sums_.forget(block_ids[i]);
  }

  void checksum_blocks(const int32_t* block_ids, const int32_t* num_tokens, int count,
                       uint64_t* checksums) {
    std::atomic<int> next{0};
    pool_.run([&](int) {
      for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
        if (block_sums_.find(block_ids[i], num_tokens[i], &checksums[i])) continue;
        checksums[i] = 0;
        for (int offset = 0; offset < num_tokens[i]; offset++) {
          checksums[i] += read_checksum(block_ids[i], offset);
        }
        block_sums_.set(block_ids[i], num_tokens[i], checksums[i]);
      }
    });
  }

  void clear_tails(const int32_t* block_ids, const int32_t* num_tokens, int count) {
    for (int i = 0; i < count; i++) {
      if (num_tokens[i] % TILE == 0 || model_.kv_format != HW_BF16) continue;
      for (int layer = 0; layer < model_.num_layers; layer++) {
        for (int head = 0; head < model_.num_kv_heads; head++) {
          const KvTiles tiles = tiles_of(layer, block_ids[i], head, num_tokens[i]);
          ops_->clear_values(num_tokens[i] % TILE, model_.head_dim, tiles.values);
        }
      }
    }
  }

  void profile(double* seconds) {
    std::copy(seconds_, seconds_ + HW_NUM_PARTS, seconds);
    std::fill(seconds_, seconds_ + HW_NUM_PARTS, 0.0);
  }

 private:
  // The tiles of keys and values that hold a token.
  struct KvTiles {
    uint8_t* keys;
    uint8_t* values;
  };

  KvTiles tiles_of(int layer, int32_t block_id, int head, int offset) const {
    const int64_t tile_bytes = kv_tile_bytes(model_.kv_format, model_.head_dim);
    uint8_t* block = model_.kv + layer * layer_bytes_ + block_id * block_bytes_;
    uint8_t* keys = block + head * head_bytes_ + offset / TILE * tile_bytes;
    return {keys, keys + model_.block_size / TILE * tile_bytes};
  }

  const int32_t* table(int span) const {
    return reinterpret_cast<const int32_t*>(step_->block_tables[span]);
  }

  uint64_t* token_sums(int t) { return &token_sums_[int64_t{t} * NUM_SUMS]; }

  // Returns the checksum of a token that was written before.
  uint64_t read_checksum(int32_t block_id, int offset) const {
    uint64_t sums[NUM_SUMS] = {};
    for (int layer = 0; layer < model_.num_layers; layer++) {
      for (int head = 0; head < model_.num_kv_heads; head++) {
        const KvTiles tiles = tiles_of(layer, block_id, head, offset);
        ops_->sum_kv(tiles.keys, tiles.values, offset % TILE, model_.head_dim, model_.kv_format,
                     sums);
      }
    }
    return mix_sums(sums, offset);
  }

  void prepare() {
    const HwStep& s = *step_;
    const int64_t tokens = s.num_tokens;
    const int num_at_once = std::min(SCORED_ROWS, s.num_scored);
    const int num_head_rows = std::max(s.num_rows, num_at_once);
    reserve_counters();
    token_sums_.reserve(tokens * NUM_SUMS);
    std::fill(token_sums_.get(), token_sums_.get() + tokens * NUM_SUMS, 0);
    // Products read whole tiles of rows; a token may be requested more than once.
    const int64_t padded = std::max(s.num_tokens, num_head_rows) + TILE;
    hidden_.reserve(tokens * model_.hidden_size);
    normed_.reserve(padded * model_.hidden_size);
    qkv_.reserve(tokens * (q_size_ + 2 * kv_size_));
    queries_.reserve(tokens * q_size_);
    mixed_.reserve(padded * q_size_);
    inner_.reserve(padded * model_.inner_size);
    if (model_.activation_format == HW_INT8) {
      const int64_t width = std::max({model_.hidden_size, q_size_, model_.inner_size});
      groups_.reserve(padded * width / GROUP);
    }
    places_.reserve(tokens);
    span_of_.reserve(tokens);
    first_token_.reserve(s.num_spans);
    items_.clear();
    int token = 0;
    for (int span = 0; span < s.num_spans; span++) {
      first_token_[span] = token;
      for (int i = 0; i < s.lengths[span]; i++, token++) {
        places_[token] = s.starts[span] + i;
        span_of_[token] = span;
      }
      const int num_rows = s.lengths[span] * group_size_;
      for (int head = 0; head < model_.num_kv_heads; head++) {
        for (int row = 0; row < num_rows; row += TILE) {
          items_.push_back({span, head, row, std::min(TILE, num_rows - row)});
        }
      }
    }
    // Longest first, so that no thread ends with a long item.
    std::stable_sort(
        items_.begin(), items_.end(),
        [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
    const int num_stored = std::max(s.logits ? 0 : s.num_sampled, num_at_once);
    if (num_stored) logits_.reserve(int64_t{num_stored} * logits_stride());
    int64_t max_edits = 0;
    for (int row = 0; row < s.num_sampled; row++) {
      const HwSampling& one = s.samplings[row];
      max_edits = std::max(max_edits, int64_t{one.num_banned} + one.num_biases + one.num_seen);
    }
    for (int t = 0; t < pool_.num_threads(); t++) {
      if (num_stored) samplers_[t].reserve(model_.vocab_size, max_edits, s.masks != nullptr);
      products_[t].reserve(product_scratch(std::max(s.num_tokens, num_head_rows)));
      best_[t].reserve(int64_t{num_head_rows} * 32);
      best_ids_[t].reserve(int64_t{num_head_rows} * 16);
    }
  }

  void reserve_counters() {
    const int num_pieces = (step_->num_scored + SCORED_ROWS - 1) / SCORED_ROWS;
    const int num_phases = model_.num_layers * 10 + 9 + 3 * num_pieces;
    const int count = num_phases * (pool_.num_threads() + 1);
    if (count > num_counters_) {
      counters_.reset(new Counter[count]);
      num_counters_ = count;
    }
  }

  int64_t cost(const AttentionItem& item) const {
    return step_->starts[item.span] + (item.first_row + item.num_rows) / group_size_;
  }

  // Takes items of a phase from a shared counter until none is left.
  template <typename F>
  void share(Phase& phase, int count, const F& work) {
    begin(phase, count);
    std::atomic<int>& next = phase.counters[1].next;
    int num_done = 0;
    for (int item = next.fetch_add(1); item < count; item = next.fetch_add(1), num_done++) {
      work(item);
    }
    pool_.finish(phase.counters[0].next, num_done, count);
  }

  // Each thread has its own range, because adjacent memory is prefetched, and then takes items of
  // the other ranges.
  template <typename F>
  void share_ranges(Phase& phase, int count, int thread, const F& work) {
    begin(phase, count);
    const int num_threads = pool_.num_threads();
    int num_done = 0;
    for (int turn = 0; turn < num_threads; turn++) {
      const int owner = (thread + turn) % num_threads;
      const int begin = int(int64_t{count} * owner / num_threads);
      const int end = int(int64_t{count} * (owner + 1) / num_threads);
      std::atomic<int>& next = phase.counters[1 + owner].next;
      for (int item = begin + next.fetch_add(1); item < end;
           item = begin + next.fetch_add(1), num_done++) {
        work(item);
      }
    }
    pool_.finish(phase.counters[0].next, num_done, count);
  }

  // Divides rows into slices for the threads.
  template <typename F>
  void share_rows(Phase& phase, int count, const F& work) {
    const int slice = std::clamp(count / (4 * pool_.num_threads()), 1, 32);
    share(phase, (count + slice - 1) / slice, [&](int item) {
      for (int row = item * slice; row < std::min(count, (item + 1) * slice); row++) work(row);
    });
  }

  void run(int thread) {
    const HwStep& s = *step_;
    Stopwatch watch(thread == 0 ? seconds_ : nullptr);
    Phase phase;
    share_rows(phase, s.num_tokens, [&](int t) {
      ops_->embed(model_.embedding, s.token_ids[t], &hidden_[int64_t{t} * model_.hidden_size]);
      normalize(t, model_.layers[0].attention_norm, model_.layers[0].qkv);
    });
    watch.lap(HW_NORM_ROPE);
    sync(phase, watch);
    for (int layer = 0; layer < model_.num_layers; layer++) run_layer(layer, thread, phase, watch);
    if (s.num_rows) choose(thread, phase, watch);
    for (int first = 0; first < s.num_scored; first += SCORED_ROWS) {
      score(first, std::min(SCORED_ROWS, s.num_scored - first), thread, phase, watch);
    }
    if (s.num_hidden) share_rows(phase, s.num_hidden, [&](int row) { write_hidden(row); });
    ops_->thread_end();
  }

  void run_layer(int index, int thread, Phase& phase, Stopwatch& watch) {
    const HwLayer& layer = model_.layers[index];
    const int num_tokens = step_->num_tokens;
    const int64_t hidden = model_.hidden_size, inner = model_.inner_size;

    multiply({normed_.get(), groups_.get(), num_tokens, &layer.qkv, Epilogue::Store, qkv_.get(),
              nullptr, q_size_ + 2 * kv_size_, nullptr, nullptr, 0, nullptr},
             thread, phase);
    watch.lap(HW_LINEAR);
    sync(phase, watch);
    share_rows(phase, num_tokens, [&](int t) { place_token(layer, index, t); });
    watch.lap(HW_NORM_ROPE);
    sync(phase, watch);
    share(phase, int(items_.size()), [&](int item) { attend(layer, index, items_[item], thread); });
    watch.lap(HW_ATTENTION);
    sync(phase, watch);
    quantize(mixed_.get(), layer.o, phase, watch);
    multiply({mixed_.get(), groups_.get(), num_tokens, &layer.o, Epilogue::Add, hidden_.get(),
              nullptr, hidden, nullptr, nullptr, 0, nullptr},
             thread, phase);
    watch.lap(HW_LINEAR);
    sync(phase, watch);
    share_rows(phase, num_tokens, [&](int t) { normalize(t, layer.mlp_norm, layer.gate_up); });
    watch.lap(HW_NORM_ROPE);
    sync(phase, watch);
    multiply({normed_.get(), groups_.get(), num_tokens, &layer.gate_up, Epilogue::SiluMul, nullptr,
              inner_.get(), inner, nullptr, nullptr, 0, nullptr},
             thread, phase);
    watch.lap(HW_LINEAR);
    sync(phase, watch);
    quantize(inner_.get(), layer.down, phase, watch);
    multiply({inner_.get(), groups_.get(), num_tokens, &layer.down, Epilogue::Add, hidden_.get(),
              nullptr, hidden, nullptr, nullptr, 0, nullptr},
             thread, phase);
    watch.lap(HW_LINEAR);
    sync(phase, watch);
    if (index + 1 == model_.num_layers) return;
    const HwLayer& next = model_.layers[index + 1];
    share_rows(phase, num_tokens, [&](int t) { normalize(t, next.attention_norm, next.qkv); });
    watch.lap(HW_NORM_ROPE);
    sync(phase, watch);
  }

  // Rows of a power of two or so would have their columns in the same sets of the caches.
  int64_t logits_stride() const { return model_.vocab_size + 5 * TILE; }

  // Chooses the token of each row.
  void choose(int thread, Phase& phase, Stopwatch& watch) {
    const HwStep& s = *step_;
    float* logits = s.logits ? s.logits : logits_.get();
    const int64_t stride = s.logits ? model_.vocab_size : logits_stride();
    const HeadRows head{s.num_rows, logits, stride, s.logits ? s.num_rows : s.num_sampled, s.masks};
    run_head(head, thread, phase, watch, [&](int row) { return s.rows[row]; });
    share(phase, s.num_rows, [&](int row) {
      const BestLogit best = find_best(row);
      s.chosen_ids[row] = best.id;
      s.best[row] = best.value;
      if (row >= s.num_sampled || !std::isfinite(best.value)) return;
      samplers_[thread].run(*ops_, s.samplings[row], mask_of(row), logits + row * stride,
                            model_.vocab_size, s.chosen_ids[row], s.best[row], s.logprobs[row]);
    });
    watch.lap(HW_SAMPLING);
  }

  // Scores the tokens that follow some tokens of prompts.
  void score(int first, int count, int thread, Phase& phase, Stopwatch& watch) {
    const HwStep& s = *step_;
    const HwScored* scored = s.scored + first;
    const HeadRows head{count, logits_.get(), logits_stride(), count, nullptr};
    sync(phase, watch);  // the rows before are read
    run_head(head, thread, phase, watch, [&](int row) { return scored[row].row; });
    share(phase, count, [&](int row) {
      HwLogprobs& logprobs = s.scores[first + row];
      const float best = find_best(row).value;
      if (!std::isfinite(best)) {
        logprobs.logprob = std::numeric_limits<float>::quiet_NaN();
        return;
      }
      samplers_[thread].score(*ops_, head.logits + row * head.stride, model_.vocab_size, best,
                              scored[row].next_id, scored[row].num_top, logprobs);
    });
    watch.lap(HW_SAMPLING);
  }

  // Multiplies tokens by the head; `token_of(row)` returns the token of a row.
  template <typename F>
  void run_head(const HeadRows& head, int thread, Phase& phase, Stopwatch& watch,
                const F& token_of) {
    share_rows(phase, head.count, [&](int row) {
      ops_->norm(&hidden_[int64_t{token_of(row)} * model_.hidden_size], model_.final_norm,
                 model_.norm_eps, model_.hidden_size, &normed_[int64_t{row} * model_.hidden_size]);
      quantize_row(normed_.get(), model_.head, row);
      // Of all threads, because one that comes late takes no part.
      for (int t = 0; t < pool_.num_threads(); t++) {
        std::fill_n(&best_[t][row * 32], 16, -std::numeric_limits<float>::infinity());
        std::fill_n(&best_[t][row * 32 + 16], 16, 0.0f);
        std::fill_n(&best_ids_[t][row * 16], 16, 0);
      }
    });
    sync(phase, watch);
    if (head.masks) wait_for_masks();
    watch.lap(HW_WAIT);
    multiply({normed_.get(), groups_.get(), head.count, &model_.head, Epilogue::Best, head.logits,
              nullptr, head.stride, best_[thread].get(), best_ids_[thread].get(), head.num_stored,
              head.masks},
             thread, phase);
    watch.lap(HW_HEAD);
    sync(phase, watch);
  }

  // Writes the last hidden state of a token after the final norm, in fp32.
  void write_hidden(int row) {
    const int64_t size = model_.hidden_size;
    const float* x = &hidden_[step_->hidden_rows[row] * size];
    double sum = 0.0;
    for (int64_t i = 0; i < size; i++) sum += double(x[i]) * x[i];
    const double factor = 1.0 / std::sqrt(sum / double(size) + model_.norm_eps);
    float* out = step_->hidden + row * size;
    for (int64_t i = 0; i < size; i++) out[i] = float(x[i] * factor * model_.final_norm[i]);
  }

  const uint32_t* mask_of(int row) const {
    return step_->masks ? reinterpret_cast<const uint32_t*>(step_->masks[row]) : nullptr;
  }

  // Masks are usually written long before the head. A thread that waits leaves its core to others.
  void wait_for_masks() const {
    if (!step_->masks_ready) return;
    while (!__atomic_load_n(step_->masks_ready, __ATOMIC_ACQUIRE)) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // Merges what the threads found for one row.
  BestLogit find_best(int row) {
    float best = -std::numeric_limits<float>::infinity(), check = 0.0f;
    int32_t id = 0;
    for (int t = 0; t < pool_.num_threads(); t++) {
      for (int lane = 0; lane < 16; lane++) {
        const float value = best_[t][row * 32 + lane];
        const int32_t at = best_ids_[t][row * 16 + lane];
        if (value > best || (value == best && at < id)) {
          best = value;
          id = at;
        }
        check += best_[t][row * 32 + 16 + lane];
      }
    }
    return {id, std::isnan(check) ? check : best};
  }

  void multiply(const Product& product, int thread, Phase& phase) {
    const int num_items = (product.linear->num_outputs + 31) / 32;
    const auto run = takes_int8(*product.linear) ? ops_->multiply_int8 : ops_->multiply;
    share_ranges(phase, num_items, thread,
                 [&](int item) { run(product, item, products_[thread].get()); });
  }

  // Whether the inputs of a layer are quantized.
  bool takes_int8(const HwLinear& linear) const {
    return model_.activation_format == HW_INT8 && linear.format != HW_BF16;
  }

  void quantize_row(const bf16* inputs, const HwLinear& linear, int row) {
    if (!takes_int8(linear)) return;
    const int64_t width = linear.num_inputs;
    ops_->quantize_row(inputs + row * width, width, linear.format, &groups_[row * width / GROUP]);
  }

  void quantize(const bf16* inputs, const HwLinear& linear, Phase& phase, Stopwatch& watch) {
    if (!takes_int8(linear)) return;
    share_rows(phase, step_->num_tokens, [&](int t) { quantize_row(inputs, linear, t); });
    watch.lap(HW_LINEAR);
    sync(phase, watch);
  }

  // Normalizes the inputs of a token for `linear`.
  void normalize(int t, const float* weight, const HwLinear& linear) {
    ops_->norm(&hidden_[int64_t{t} * model_.hidden_size], weight, model_.norm_eps,
               model_.hidden_size, &normed_[int64_t{t} * model_.hidden_size]);
    quantize_row(normed_.get(), linear, t);
  }

  // Rotates queries and key of a token to its position and writes key and value to the KV store.
  void place_token(const HwLayer& layer, int index, int t) {
    const HwStep& s = *step_;
    const int hd = model_.head_dim, span = span_of_[t], place = places_[t];
    const float* cosines = model_.cosines + int64_t{place} * (hd / 2);
    const float* sines = model_.sines + int64_t{place} * (hd / 2);
    float* row = &qkv_[int64_t{t} * (q_size_ + 2 * kv_size_)];
    for (int head = 0; head < model_.num_heads; head++) {
      ops_->norm_rotate(row + head * hd, layer.q_norm, model_.norm_eps, cosines, sines, hd);
      // Queries of a KV head are adjacent: [kv head][token][head of the group].
      const int64_t at = int64_t{head / group_size_} * step_->num_tokens + t;
      ops_->to_bf16(row + head * hd, hd, &queries_[(at * group_size_ + head % group_size_) * hd]);
    }
    const int32_t block_id = table(span)[place / model_.block_size];
    const int offset = place % model_.block_size;
    // Attention multiplies the missing values of a tile by 0, which must not be 0 times NaN. So the
    // last token written into a tile that this step began clears the rest of the tile.
    const bool is_last = t + 1 == first_token_[span] + s.lengths[span];
    const bool is_new_end =
        is_last && model_.kv_format == HW_BF16 && place / TILE * TILE >= s.starts[span];
    for (int head = 0; head < model_.num_kv_heads; head++) {
      float* key = row + q_size_ + head * hd;
      ops_->norm_rotate(key, layer.k_norm, model_.norm_eps, cosines, sines, hd);
      const KvTiles tiles = tiles_of(index, block_id, head, offset);
      ops_->write_kv(key, key + kv_size_, offset % TILE, hd, model_.kv_format, tiles.keys,
                     tiles.values, token_sums(t));
      if (is_new_end) ops_->clear_values(offset % TILE + 1, hd, tiles.values);
    }
  }

  void attend(const HwLayer& layer, int index, const AttentionItem& item, int thread) {
    const HwStep& s = *step_;
    const int64_t hd = model_.head_dim, first = first_token_[item.span];
    Attention a;
    a.queries =
        &queries_[((int64_t{item.kv_head} * s.num_tokens + first) * group_size_ + item.first_row) *
                  hd];
    a.num_rows = item.num_rows;
    a.first_row = item.first_row;
    a.group_size = group_size_;
    a.head_dim = int(hd);
    a.start = s.starts[item.span];
    a.window = layer.window;
    a.kv = model_.kv + index * layer_bytes_;
    a.block_bytes = block_bytes_;
    a.head_offset = item.kv_head * head_bytes_;
    a.blocks = table(item.span);
    a.block_size = model_.block_size;
    a.kv_format = model_.kv_format;
    a.out = &mixed_[first * q_size_ + item.kv_head * group_size_ * hd];
    a.out_stride = q_size_;
    ops_->attend(a, attention_[thread].get());
  }

  void begin(Phase& phase, int count) {
    phase.counters = &counters_[size_t(phase.index++) * (pool_.num_threads() + 1)];
    phase.count = count;
  }

  void sync(const Phase& phase, Stopwatch& watch) {
    pool_.wait(phase.counters[0].next, phase.count);
    watch.lap(HW_WAIT);
  }

  const HwModel model_;
  const Ops* const ops_;
  Pool pool_;
  const int q_size_, kv_size_, group_size_;
  const int64_t head_bytes_, block_bytes_, layer_bytes_;
  const HwStep* step_ = nullptr;
  Buffer<float> hidden_, qkv_, logits_;
  Buffer<bf16> normed_, queries_, mixed_, inner_;
  Buffer<Int8Group> groups_;  // the inputs of the next product
  Buffer<int32_t> places_, span_of_, first_token_;
  Buffer<uint8_t> staging_;
  std::vector<AttentionItem> items_;
  std::vector<Buffer<uint8_t>> products_, attention_;
  std::vector<Buffer<float>> best_;
  std::vector<Buffer<int32_t>> best_ids_;
  std::vector<Sampler> samplers_;
  int num_counters_ = 0;
  std::unique_ptr<Counter[]> counters_;
  Buffer<uint64_t> token_sums_;  // of the tokens of the step, NUM_SUMS each
  BlockSums block_sums_;
  double seconds_[HW_NUM_PARTS] = {};
};

bool fits(const HwModel& m) {
  return m.hidden_size % 32 == 0 && m.inner_size % 32 == 0 && m.head_dim % 32 == 0 &&
         m.head_dim <= MAX_HEAD_DIM && m.num_heads % m.num_kv_heads == 0 &&
         m.vocab_size % TILE == 0 && m.block_size % TILE == 0;
}

const Ops* ops_for(int isa) {
#if defined(__x86_64__)
  switch (isa) {
    case HW_AMX:
      return amx_ops();
    case HW_AVX512_VNNI:
      return avx512_vnni_ops();
    case HW_AVX512:
      return avx512_ops();
    case HW_AVX2:
      return avx2_ops();
    default:
      break;
  }
#endif
  return plain_ops();
}

}  // namespace
}  // namespace headway

HW_API int64_t hw_block_bytes(const HwModel* m) {
  const int64_t tile = headway::kv_tile_bytes(m->kv_format, m->head_dim);
  return 2 * m->num_kv_heads * (m->block_size / headway::TILE) * tile;
}

HW_API int32_t hw_create(const HwModel* model, int32_t isa, int32_t num_threads, void** engine) {
  if (!headway::fits(*model) || isa > hw_best_isa() || num_threads < 1) return HW_MISFIT;
  try {
    *engine = new headway::Engine(*model, headway::ops_for(isa), num_threads);
    return HW_DONE;
  } catch (const std::system_error&) {
    return HW_NO_THREADS;
  } catch (const std::exception&) {
    return HW_NO_MEMORY;
  }
}

HW_API void hw_destroy(void* engine) { delete static_cast<headway::Engine*>(engine); }

HW_API int32_t hw_step(void* engine, const HwStep* step) {
  try {
    static_cast<headway::Engine*>(engine)->step(*step);
    return HW_DONE;
  } catch (const std::exception&) {
    return HW_NO_MEMORY;
  }
}

HW_API void hw_set_ready(int32_t* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

HW_API int32_t hw_sample(int32_t isa, const HwSampling* sampling, const uint32_t* mask,
                         float* logits, int32_t vocab_size, int32_t* chosen_id, float* best,
                         HwLogprobs* logprobs) {
  if (vocab_size % headway::TILE || isa > hw_best_isa()) return HW_MISFIT;
  try {
    const headway::Ops& ops = *headway::ops_for(isa);
    headway::Sampler sampler;
    sampler.reserve(vocab_size,
                    int64_t{sampling->num_banned} + sampling->num_biases + sampling->num_seen,
                    mask != nullptr);
    *best = logits[*chosen_id = ops.find_best(logits, vocab_size)];
    sampler.run(ops, *sampling, mask, logits, vocab_size, *chosen_id, *best, *logprobs);
    return HW_DONE;
  } catch (const std::exception&) {
    return HW_NO_MEMORY;
  }
}

HW_API int32_t hw_copy_blocks(void* engine, const int32_t* sources, const int32_t* targets,
                              int32_t count) {
  try {
    static_cast<headway::Engine*>(engine)->copy_blocks(sources, targets, count);
    return HW_DONE;
  } catch (const std::exception&) {
    return HW_NO_MEMORY;
  }
}

HW_API void hw_checksum_blocks(void* engine, const int32_t* block_ids, const int32_t* num_tokens,
                               int32_t count, uint64_t* checksums) {
  static_cast<headway::Engine*>(engine)->checksum_blocks(block_ids, num_tokens, count, checksums);
}

HW_API void hw_forget_blocks(void* engine, const int32_t* block_ids, int32_t count) {
  static_cast<headway::Engine*>(engine)->forget_blocks(block_ids, count);
}

HW_API void hw_clear_tails(void* engine, const int32_t* block_ids, const int32_t* num_tokens,
                           int32_t count) {
  static_cast<headway::Engine*>(engine)->clear_tails(block_ids, num_tokens, count);
}

HW_API void hw_profile(void* engine, double* seconds) {
  static_cast<headway::Engine*>(engine)->profile(seconds);
}
