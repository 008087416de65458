#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace headway {

namespace {

constexpr double LOG2_E = 1.4426950408889634;
constexpr double INFINITE = std::numeric_limits<double>::infinity();

constexpr int64_t ALL = std::numeric_limits<int64_t>::max();
constexpr int FEW = 1024;       // probs that are selected one by one
constexpr int MAX_PASSES = 32;  // passes over a row; only equal probs need so many

int num_chunks(int size) { return (size + CHUNK - 1) / CHUNK; }

// Writes bounds for the next pass. If the sum is what matters, around the place where it is likely
// to be found, else evenly.
void next_bounds(double low, double high, const Share& at_low, const Share& at_high, double max_sum,
                 double* bounds) {
  const double ratio = low > 0.0 ? high / low : 0.0;
  if (max_sum < INFINITE && at_low.sum < INFINITE && ratio > 1.5) {
    const double part = (at_low.sum - max_sum) / (at_low.sum - at_high.sum);
    const double guess = low * std::pow(ratio, part);
    const double around[NUM_BOUNDS] = {0.8, 0.94, 1.06, 1.2};
    for (int b = 0; b < NUM_BOUNDS; b++) {
      bounds[b] = std::min(std::max(guess * around[b], std::nextafter(low, high)), high);
    }
    return;
  }
  const double step = low > 0.0 ? std::pow(ratio, 1.0 / (NUM_BOUNDS + 1)) : 16.0;
  double bound = low > 0.0 ? low : high / std::pow(step, NUM_BOUNDS + 1);
  for (int b = 0; b < NUM_BOUNDS; b++) bounds[b] = bound *= step;
}

void rate(const Ops& ops, const float* logits, int size, int32_t id, double log_total,
          HwLogprobs& logprobs) {
  logprobs.logprob = float(logits[id] - log_total);
  logprobs.rank = 1 + ops.count_above(logits, size, logits[id]);
}

}  // namespace

void Sampler::reserve(int vocab_size, int64_t max_edits, bool has_masks) {
  probs_.reserve(vocab_size);
  sums_.reserve(num_chunks(vocab_size));
  tops_.reserve(num_chunks(vocab_size));
  values_.reserve(vocab_size + 8);
  logit_tops_.reserve(num_chunks(vocab_size));
  ids_.reserve(vocab_size);
  edited_ids_.reserve(max_edits);
  before_.reserve(max_edits);
  if (has_masks) masked_.reserve(vocab_size);
}

void Sampler::run(const Ops& ops, const HwSampling& sampling, const uint32_t* mask, float* logits,
                  int vocab_size, int32_t& chosen, float& best, HwLogprobs& logprobs) {
  Row row{ops, sampling, logits, vocab_size};
  const bool has_logprobs = sampling.num_logprobs >= 0;
  double log_total = 0.0;
  if (has_logprobs) {
    log_total = list_top(ops, logits, vocab_size, best, sampling.num_logprobs, logprobs);
  }
  if (mask) {
    row.logits = masked_.get();
    ops.mask_row(logits, mask, vocab_size, row.logits);
  }
  edit(row);
  if (mask || num_edits_) best = row.logits[chosen = ops.find_best(row.logits, vocab_size)];
  if (sampling.temperature > 0.0 && std::isfinite(best)) chosen = draw(row, best);
  undo(row);
  if (has_logprobs) rate(ops, logits, vocab_size, chosen, log_total, logprobs);
}

void Sampler::score(const Ops& ops, const float* logits, int vocab_size, float best,
                    int32_t token_id, int num_top, HwLogprobs& logprobs) {
  const double log_total = list_top(ops, logits, vocab_size, best, num_top, logprobs);
  rate(ops, logits, vocab_size, token_id, log_total, logprobs);
}

// No product below may be fused with a sum: the reference rounds both.
void Sampler::edit(const Row& row) {
  const HwSampling& s = row.sampling;
  num_edits_ = 0;
  const auto change = [&](int32_t id, const auto& changed) {
    if (id < 0 || id >= row.size) return;
    edited_ids_[num_edits_] = id;
    before_[num_edits_++] = row.logits[id];
    row.logits[id] = changed(row.logits[id]);
  };
  for (int i = 0; i < s.num_banned; i++) {
    change(s.banned_ids[i], [](float) { return -std::numeric_limits<float>::infinity(); });
  }
  for (int i = 0; i < s.num_biases; i++) {
    change(s.bias_ids[i], [&](float x) { return x + s.biases[i]; });
  }
  for (int i = 0; i < s.num_seen; i++) {
    change(s.seen_ids[i], [&](float x) {
      const float count = s.output_counts[i];
      x = x > 0.0f ? x / s.repetition_penalty : x * s.repetition_penalty;
      x -= s.frequency_penalty * count;
      return count > 0.0f ? x - s.presence_penalty : x;
    });
  }
}

void Sampler::undo(const Row& row) {
  while (num_edits_) {
    num_edits_--;
    row.logits[edited_ids_[num_edits_]] = before_[num_edits_];
  }
}

int Sampler::draw(const Row& row, float best) {
  const HwSampling& s = row.sampling;
  const Ops& ops = row.ops;
  double total = ops.softmax_row(row.logits, row.size, best, LOG2_E / s.temperature, probs());
  // A prob of 0 is never drawn.
  Cut cut{0.0, 0, total};
  int last_tied = -1;
  if (s.top_p < 1.0 || s.min_p > 0.0 || (s.top_k > 0 && s.top_k < row.size)) {
    cut = filter(row, total);
    int num_equal = 0;
    total =
        ops.sum_chunks_above(probs(), row.size, cut.threshold, sums_.get(), ids_.get(), &num_equal);
    for (int i = 0; i < std::min<int64_t>(num_equal, cut.num_tied); i++) {
      last_tied = ids_[i];
      sums_[last_tied / CHUNK] += cut.threshold;
      total += cut.threshold;
    }
  }
  const double target = s.draw * total;
  double sum = 0.0;
  int last = 0;  // where the last prob is, should rounding lead beyond the end
  for (int chunk = 0; chunk < num_chunks(row.size); chunk++) {
    if (sums_[chunk] <= 0.0) continue;
    last = chunk;
    if (sum + sums_[chunk] > target) break;
    sum += sums_[chunk];
  }
  int chosen = 0;
  for (int id = last * CHUNK; id < std::min(row.size, (last + 1) * CHUNK); id++) {
    const double prob = probs_[id];
    if (prob < cut.threshold || (prob == cut.threshold && id > last_tied)) continue;
    chosen = id;
    sum += prob;
    if (sum > target) break;
  }
  return chosen;
}

Sampler::Cut Sampler::filter(const Row& row, double total) {
  const HwSampling& s = row.sampling;
  int64_t max_count = row.size;
  Cut cut{0.0, ALL, total};
  if (s.min_p > 0.0) {
    const double bounds[NUM_BOUNDS] = {s.min_p, INFINITE, INFINITE, INFINITE};
    Share shares[NUM_BOUNDS];
    row.ops.sum_at_least(probs(), row.size, bounds, shares);
    cut = {s.min_p, ALL, shares[0].sum};
    max_count = shares[0].count;
  }
  if (s.top_k > 0 && s.top_k < max_count) {
    max_count = s.top_k;
    const bool has_guess = s.top_k <= num_chunks(row.size);
    cut = find_cut(row, max_count, INFINITE,
                   has_guess ? nth_top(tops_.get(), row.size, s.top_k) : 1e-3);
  }
  if (s.top_p < 1.0) {
    const double guess = std::max(cut.threshold, (1.0 - s.top_p) * cut.sum / 32768.0);
    cut = find_cut(row, max_count, s.top_p * cut.sum, guess);
  }
  return cut;
}

// Narrows the range of the threshold by passes over the row, then selects among the probs in it.
Sampler::Cut Sampler::find_cut(const Row& row, int64_t max_count, double max_sum, double guess) {
  double low = 0.0, high = 2.0;  // probs of at least `high` stay, probs below `low` do not
  Share at_low{row.size, INFINITE}, at_high{0, 0.0};
  double bounds[NUM_BOUNDS] = {guess, guess * 8.0, guess * 64.0, guess * 512.0};
  for (int pass = 0; pass < MAX_PASSES && at_low.count - at_high.count > FEW; pass++) {
    Share shares[NUM_BOUNDS];
    row.ops.sum_at_least(probs(), row.size, bounds, shares);
    for (int b = 0; b < NUM_BOUNDS; b++) {
      if (shares[b].count >= max_count || shares[b].sum >= max_sum) {
        low = bounds[b];
        at_low = shares[b];
      } else if (bounds[b] < high) {
        high = bounds[b];
        at_high = shares[b];
        break;
      }
    }
    next_bounds(low, high, at_low, at_high, max_sum, bounds);
  }
  const int num_values = row.ops.copy_between(probs(), row.size, low, high, values_.get());
  return select(num_values, max_count, max_sum, at_high.count, {high, ALL, at_high.sum});
}

// Quickselect in three parts, so that equal probs are found together. `count` probs are above
// the values; `cut` keeps just these.
Sampler::Cut Sampler::select(int num_values, int64_t max_count, double max_sum, int64_t count,
                             Cut cut) {
  double *begin = values_.get(), *end = begin + num_values;
  while (begin < end) {
    const double first = *begin, middle = begin[(end - begin) / 2], last = end[-1];
    const double pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
    double* equal = std::partition(begin, end, [&](double x) { return x > pivot; });
    double* less = std::partition(equal, end, [&](double x) { return x == pivot; });
    const int64_t count_before = count + (equal - begin);
    double sum_before = cut.sum;
    for (double* x = begin; x < equal; x++) sum_before += *x;
    if (count_before >= max_count || sum_before >= max_sum) {
      end = equal;
      continue;
    }
    int64_t num_tied = std::min<int64_t>(less - equal, max_count - count_before);
    if (pivot > 0.0 && max_sum < INFINITE) {
      const double missing = std::ceil((max_sum - sum_before) / pivot);
      if (missing < double(num_tied)) num_tied = std::max<int64_t>(1, int64_t(missing));
    }
    cut = {pivot, num_tied, sum_before + double(num_tied) * pivot};
    if (num_tied < less - equal) break;
    count = count_before + num_tied;
    begin = less;
  }
  return cut;
}

template <typename T>
T Sampler::nth_top(const T* tops, int size, int n) {
  double *begin = values_.get(), *end = begin + num_chunks(size);
  std::copy(tops, tops + num_chunks(size), begin);
  std::nth_element(begin, begin + n - 1, end, std::greater<double>());
  return T(begin[n - 1]);
}

double Sampler::list_top(const Ops& ops, const float* logits, int size, float best, int num_top,
                         HwLogprobs& logprobs) {
  const double log_total = best + std::log(ops.sum_exp(logits, size, best, logit_tops_.get()));
  const int wanted = std::min(num_top, std::min(size, HW_MAX_LOGPROBS));
  if (wanted <= 0) return log_total;
  const bool has_bound = wanted <= num_chunks(size);
  const float bound = has_bound ? nth_top(logit_tops_.get(), size, wanted)
                                : -std::numeric_limits<float>::infinity();
  const int count = ops.list_at_least(logits, logit_tops_.get(), size, bound, ids_.get());
  std::partial_sort(ids_.get(), ids_.get() + wanted, ids_.get() + count, [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  for (int i = 0; i < wanted; i++) {
    logprobs.top_ids[i] = ids_[i];
    logprobs.top_logprobs[i] = float(logits[ids_[i]] - log_total);
  }
  return log_total;
}

}  // namespace headway
