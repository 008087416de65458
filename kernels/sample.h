// Chooses the token of one row of logits.

#pragma once

#include "memory.h"
#include "ops.h"

namespace headway {

// Scratch memory of one thread. A result depends on nothing but the arguments of its call.
class Sampler {
 public:
  // Makes room for rows of `vocab_size` logits with at most `max_edits` changes, and for masks.
  void reserve(int vocab_size, int64_t max_edits, bool has_masks);
  // `mask` may be null. `chosen` and `best` are the best token of all and its logit; replaces them
  // by the token to choose and the best logit after all changes. If that is not finite, the row
  // cannot be sampled. The logits are as before when the call returns.
  void run(const Ops& ops, const HwSampling& sampling, const uint32_t* mask, float* logits,
           int vocab_size, int32_t& chosen, float& best, HwLogprobs& logprobs);
  // Writes the log-probability of one token and of the `num_top` likeliest. `best` is the best
  // logit of all, and finite.
  void score(const Ops& ops, const float* logits, int vocab_size, float best, int32_t token_id,
             int num_top, HwLogprobs& logprobs);

 private:
  struct Row {
    const Ops& ops;
    const HwSampling& sampling;
    float* logits;
    int size;
  };
  // What filters keep: every prob above the threshold and the first `num_tied` equal to it. `sum`
  // is their sum.
  struct Cut {
    double threshold;
    int64_t num_tied;
    double sum;
  };

  void edit(const Row& row);
  void undo(const Row& row);
  int draw(const Row& row, float best);
  // Returns the cut of all filters together: each keeps the largest probs, so all together do.
  Cut filter(const Row& row, double total);
  // Keeps probs in falling order, at most `max_count`, while the sum before is below `max_sum`.
  Cut find_cut(const Row& row, int64_t max_count, double max_sum, double guess);
  Cut select(int num_values, int64_t max_count, double max_sum, int64_t count, Cut cut);
  // Returns the nth largest of the maxima of chunks: the n largest probs are at least as large.
  template <typename T>
  T nth_top(const T* tops, int size, int n);
  // Lists the likeliest tokens; returns the logarithm of the sum of all exponentials.
  double list_top(const Ops& ops, const float* logits, int size, float best, int num_top,
                  HwLogprobs& logprobs);
  Probs probs() { return {probs_.get(), sums_.get(), tops_.get()}; }

  Buffer<double> probs_, sums_, tops_, values_;
  Buffer<int32_t> ids_, edited_ids_;
  Buffer<float> before_;      // logits of the edited ids
  Buffer<float> logit_tops_;  // maximum of each chunk of logits
  Buffer<float> masked_;      // logits with a mask applied
  int num_edits_ = 0;
};

}  // namespace headway
