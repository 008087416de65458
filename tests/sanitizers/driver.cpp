// Runs the thread pool, the packer and whole steps of a small model for a sanitizer to watch.
//
// Items of a phase read what others wrote in the phase before, so that a wait which orders too
// little is a data race; a step computed by several threads must equal that of one, bit for bit.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "headway.h"
#include "pool.h"

namespace {

constexpr int HIDDEN = 64, INNER = 96, LAYERS = 2, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 32;
constexpr int VOCAB = 48, BLOCK = 16, BLOCKS = 16, POSITIONS = 128;

void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "driver: %s\n", what);
  std::exit(1);
}

void run_pool(int num_threads, int num_rounds) {
  constexpr int ITEMS = 7;
  headway::Pool pool(num_threads);
  std::vector<int> slots(ITEMS), seen(ITEMS);
  for (int round = 0; round < num_rounds; round++) {
    std::atomic<int> next[3] = {}, done[3] = {};
    pool.run([&](int) {
      const auto share = [&](int phase, const auto& work) {
        int num_done = 0;
        for (int item = next[phase]++; item < ITEMS; item = next[phase]++, num_done++) work(item);
        pool.finish(done[phase], num_done, ITEMS);
        pool.wait(done[phase], ITEMS);
      };
      share(0, [&](int item) { slots[item] = round + item; });
      share(1, [&](int item) { seen[item] = slots[(item + 1) % ITEMS]; });
      share(2, [&](int item) { slots[item] = -1; });
    });
    for (int item = 0; item < ITEMS; item++) {
      require(seen[item] == round + (item + 1) % ITEMS, "a phase began before the last one ended");
    }
  }
}

struct Source {
  int32_t source;
  int block_weights;
  int block_bytes;
};

constexpr Source SOURCES[] = {
    {HW_FROM_F32, 1, 4},      {HW_FROM_F16, 1, 2},      {HW_FROM_BF16, 1, 2},
    {HW_FROM_Q4_0, 32, 18},   {HW_FROM_Q4_1, 32, 20},   {HW_FROM_Q5_0, 32, 22},
    {HW_FROM_Q5_1, 32, 24},   {HW_FROM_Q8_0, 32, 34},   {HW_FROM_Q4_K, 256, 144},
    {HW_FROM_Q5_K, 256, 176}, {HW_FROM_Q6_K, 256, 210},
};

// Packs any bytes at all, on one thread and on several, from and to arrays of exactly their size.
void run_packer(const Source& source, int format) {
  constexpr int PANELS = 6, ROWS = 16 * PANELS, INPUTS = 512;
  std::mt19937 random(11);
  const int64_t row_bytes = INPUTS / source.block_weights * source.block_bytes;
  std::vector<uint8_t> rows(ROWS * row_bytes);
  for (uint8_t& byte : rows) byte = uint8_t(random());
  std::vector<uint8_t> whole(hw_packed_bytes(format, ROWS, INPUTS)), divided(whole.size());
  const HwRows all{rows.data(), ROWS, INPUTS, source.source, 0};
  hw_pack(whole.data(), format, &all, 0, 1);
  headway::Pool pool(PANELS / 2);
  std::atomic<int> next{0};
  pool.run([&](int) {
    for (int item = next++; item < PANELS / 2; item = next++) {
      const HwRows two{rows.data() + item * 32 * row_bytes, 32, INPUTS, source.source, 0};
      hw_pack(divided.data(), format, &two, item * 2, 1);
    }
  });
  require(whole == divided, "several threads packed something else than one");
  std::vector<float> values(INPUTS);
  const HwLinear linear{whole.data(), nullptr, ROWS, INPUTS, format, 0};
  for (int output = 0; output < ROWS; output++) hw_unpack(&linear, output, values.data());
}

// A model's arrays, of exactly the size that the kernels are told.
struct Model {
  std::mt19937 random{7};
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> bytes;
  std::vector<std::vector<float>> floats;
  std::vector<HwLayer> layers{LAYERS};
  HwModel model{};
  int isa;

  const float* values(int count, float center, float spread) {
    std::normal_distribution<float> draw(center, spread);
    std::vector<float> made(count);
    for (float& value : made) value = draw(random);
    floats.push_back(std::move(made));
    return floats.back().data();
  }

  uint8_t* room(int64_t count) {
    // Aligned as the product's memory is, and ending where the kernels must stop.
    require(count % 64 == 0, "a size that is no multiple of a cache line");
    bytes.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(64, count)), std::free);
    std::memset(bytes.back().get(), 0xFF, count);
    return bytes.back().get();
  }

  HwLinear linear(int num_outputs, int num_inputs, int format, bool has_bias = false) {
    const float* rows = values(num_outputs * num_inputs, 0.0f, 0.15f);
    uint8_t* data = room(hw_packed_bytes(format, num_outputs, num_inputs));
    const HwRows from{reinterpret_cast<const uint8_t*>(rows), num_outputs, num_inputs, HW_FROM_F32,
                      0};
    hw_pack(data, format, &from, 0, 1);
    return {data,        has_bias ? values(num_outputs, 0, 0.1f) : nullptr,
            num_outputs, num_inputs,
            format,      0};
  }

  Model(int isa, int format, int kv_format, int activation_format, int window) : isa(isa) {
    floats.reserve(1000);
    const int table = format == HW_BF16 ? HW_BF16 : HW_INT8;
    for (HwLayer& layer : layers) {
      layer.attention_norm = values(HIDDEN, 1.0f, 0.2f);
      layer.q_norm = values(HEAD_DIM, 1.0f, 0.2f);
      layer.k_norm = values(HEAD_DIM, 1.0f, 0.2f);
      layer.mlp_norm = values(HIDDEN, 1.0f, 0.2f);
      layer.qkv = linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, format, true);
      layer.o = linear(HIDDEN, HEADS * HEAD_DIM, format);
      layer.gate_up = linear(2 * INNER, HIDDEN, format);
      layer.down = linear(HIDDEN, INNER, format, true);
      layer.window = window;
    }
    model.hidden_size = HIDDEN;
    model.inner_size = INNER;
    model.num_layers = LAYERS;
    model.num_heads = HEADS;
    model.num_kv_heads = KV_HEADS;
    model.head_dim = HEAD_DIM;
    model.vocab_size = VOCAB;
    model.max_positions = POSITIONS;
    model.norm_eps = 1e-5f;
    model.kv_format = kv_format;
    model.activation_format = activation_format;
    model.block_size = BLOCK;
    model.num_blocks = BLOCKS;
    model.layers = layers.data();
    model.embedding = linear(VOCAB, HIDDEN, table);
    model.head = linear(VOCAB, HIDDEN, table);
    model.final_norm = values(HIDDEN, 1.0f, 0.2f);
    model.cosines = values(POSITIONS * HEAD_DIM / 2, 0.5f, 0.1f);
    model.sines = values(POSITIONS * HEAD_DIM / 2, 0.5f, 0.1f);
    model.kv = room(hw_block_bytes(&model) * BLOCKS * LAYERS);
  }

  std::vector<float> step(void* engine, const std::vector<std::vector<int32_t>>& spans,
                          const std::vector<int32_t>& starts,
                          const std::vector<std::vector<int32_t>>& tables) {
    std::vector<int32_t> tokens, lengths, rows;
    std::vector<int64_t> addresses;
    for (size_t i = 0; i < spans.size(); i++) {
      tokens.insert(tokens.end(), spans[i].begin(), spans[i].end());
      lengths.push_back(int32_t(spans[i].size()));
      addresses.push_back(reinterpret_cast<int64_t>(tables[i].data()));
    }
    for (size_t i = 0; i < tokens.size(); i++) rows.push_back(int32_t(i));
    std::vector<float> logits(rows.size() * VOCAB), best(rows.size());
    std::vector<int32_t> chosen_ids(rows.size());
    const std::vector<int32_t> ids{3, VOCAB - 1, VOCAB, 0};  // one is outside
    const std::vector<float> numbers{2.0f, -1.0f, 9.0f, 0.0f};
    std::vector<HwSampling> samplings(rows.size() / 2 + 1);
    for (size_t i = 0; i < samplings.size(); i++) {
      HwSampling& s = samplings[i];
      s.draw = double(i) / double(samplings.size());
      s.temperature = i % 4 ? 0.3 * double(i) : 0.0;
      s.top_p = i % 3 ? 1.0 : 0.7;
      s.min_p = i % 5 ? 0.0 : 0.01;
      s.top_k = i % 2 ? 0 : int32_t(i);
      s.num_logprobs = int32_t(i) % (HW_MAX_LOGPROBS + 2) - 1;
      s.repetition_penalty = 1.5f;
      s.presence_penalty = s.frequency_penalty = 0.5f;
      s.num_banned = s.num_biases = s.num_seen = int32_t(i % (ids.size() + 1));
      s.banned_ids = s.bias_ids = s.seen_ids = ids.data();
      s.biases = s.output_counts = numbers.data();
    }
    std::vector<HwLogprobs> logprobs(samplings.size());
    HwStep step{};
    step.num_spans = int32_t(spans.size());
    step.num_tokens = int32_t(tokens.size());
    step.num_rows = int32_t(rows.size());
    step.num_sampled = int32_t(samplings.size());
    step.token_ids = tokens.data();
    step.starts = starts.data();
    step.lengths = lengths.data();
    step.block_tables = addresses.data();
    step.rows = rows.data();
    step.samplings = samplings.data();
    step.chosen_ids = chosen_ids.data();
    step.best = best.data();
    step.logprobs = logprobs.data();
    // Every row twice, for more rows than are scored at a time.
    std::vector<HwScored> scored;
    for (size_t i = 0; i < 2 * rows.size(); i++) {
      const int32_t row = rows[i % rows.size()];
      scored.push_back({row, int32_t(i * 5 % VOCAB), int32_t(i) % (HW_MAX_LOGPROBS + 1)});
    }
    std::vector<HwLogprobs> scores(scored.size());
    std::vector<float> hidden(rows.size() * HIDDEN);
    step.scored = scored.data();
    step.scores = scores.data();
    step.num_scored = int32_t(scored.size());
    step.hidden_rows = rows.data();
    step.hidden = hidden.data();
    step.num_hidden = int32_t(rows.size());
    require(hw_step(engine, &step) == HW_DONE, "a step failed");
    const std::vector<int32_t> without_logits = chosen_ids;
    step.logits = logits.data();
    require(hw_step(engine, &step) == HW_DONE, "a step with logits failed");
    require(chosen_ids == without_logits, "a step with logits chose other tokens");
    for (int32_t id : chosen_ids) {
      require(0 <= id && id < VOCAB, "a token is outside the vocabulary");
      logits.push_back(float(id));
    }
    for (const HwLogprobs& one : scores) {
      require(one.logprob <= 0.0f && 1 <= one.rank && one.rank <= VOCAB, "a score is impossible");
      logits.push_back(one.logprob);
    }
    logits.insert(logits.end(), hidden.begin(), hidden.end());
    return logits;
  }

  std::vector<float> run(int num_threads) {
    void* engine = nullptr;
    require(hw_create(&model, isa, num_threads, &engine) == HW_DONE, "no engine");
    std::vector<int32_t> prompt(37), other(5);
    for (int i = 0; i < 37; i++) prompt[i] = (i * 11) % VOCAB;
    for (int i = 0; i < 5; i++) other[i] = (i * 7) % VOCAB;
    const std::vector<int32_t> a{5, 0, 9}, b{2}, c{5, 0, 11};
    std::vector<float> all = step(engine, {prompt, other}, {0, 0}, {a, b});
    const int32_t sources[] = {9}, targets[] = {11};
    require(hw_copy_blocks(engine, sources, targets, 1) == HW_DONE, "a copy failed");
    const int32_t compared[] = {9, 11, 5};
    uint64_t checksums[3];
    const int32_t num_tokens[] = {5, 5, 5};
    hw_checksum_blocks(engine, compared, num_tokens, 3, checksums);
    require(checksums[0] == checksums[1], "a copy has another checksum");
    require(checksums[0] != checksums[2], "two blocks have one checksum");
    const uint64_t written = checksums[0];
    hw_forget_blocks(engine, compared, 3);
    hw_clear_tails(engine, compared, num_tokens, 2);
    hw_checksum_blocks(engine, compared, num_tokens, 3, checksums);
    require(checksums[0] == written, "a block that is read has another checksum");
    for (int i = 0; i < 4; i++) {
      auto more = step(engine, {{i}, {i + 1}, {i}}, {37 + i, 5 + i, 37 + i}, {a, b, c});
      all.insert(all.end(), more.begin(), more.end());
    }
    double seconds[HW_NUM_PARTS];
    hw_profile(engine, seconds);
    hw_destroy(engine);
    return all;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int num_rounds = argc > 1 ? std::atoi(argv[1]) : 500;
  for (int num_threads = 1; num_threads <= 5; num_threads++) run_pool(num_threads, num_rounds);
  for (int i = 0; i < 50; i++) headway::Pool idle(1 + i % 4);
  for (const Source& source : SOURCES) {
    for (int format : {HW_BF16, HW_INT8, HW_INT4}) run_packer(source, format);
  }
  int num_forms = 0;
  for (int isa = HW_PLAIN; isa <= hw_best_isa(); isa++) {
    for (int format : {HW_BF16, HW_INT8, HW_INT4}) {
      for (int kv_format : {HW_BF16, HW_INT8}) {
        for (int activation_format : {HW_BF16, HW_INT8}) {
          for (int window : {0, 19}) {
            Model model(isa, format, kv_format, activation_format, window);
            const auto alone = model.run(1);
            for (int num_threads : {2, 3}) {
              const auto together = model.run(num_threads);
              require(!std::memcmp(alone.data(), together.data(), alone.size() * sizeof(float)),
                      "several threads computed something else than one");
            }
            num_forms++;
          }
        }
      }
    }
  }
  std::printf("driver: %d rounds of the pool, %d forms of a model on instruction sets 0 - %d\n",
              num_rounds, num_forms, hw_best_isa());
}
