// Checksums of KV blocks: one number per token, added up over the tokens of a block.

#pragma once

#include <cstdint>
#include <vector>

namespace headway {

// Sums of one token over all layers and heads: of each of eight lanes of words, and of those sums,
// which depends on the order of the words. A change of one word always changes the checksum.
constexpr int NUM_SUMS = 16;

// Returns the checksum of a token at `offset` in its block.
inline uint64_t mix_sums(const uint64_t* sums, int offset) {
  uint64_t mixed = uint64_t(offset) + 1;
  for (int i = 0; i < NUM_SUMS; i++) {
    mixed = (mixed ^ sums[i]) * 0x9e3779b97f4a7c15u;
    mixed ^= mixed >> 32;
  }
  return mixed;
}

// The checksum of the first tokens of each block, as far as it is known.
class BlockSums {
 public:
  explicit BlockSums(int64_t num_blocks) : blocks_(num_blocks) {}

  void add_token(int32_t block_id, int offset, const uint64_t* sums) {
    Block& block = blocks_[block_id];
    if (offset == 0) block = {};
    if (block.num_tokens == offset) {
      block = {block.checksum + mix_sums(sums, offset), offset + 1};
    } else {
      block = {};
    }
  }

  void set(int32_t block_id, int num_tokens, uint64_t checksum) {
    blocks_[block_id] = {checksum, num_tokens};
  }

  void forget(int32_t block_id) { blocks_[block_id] = {}; }

  // Returns whether the checksum of so many tokens is known.
  bool find(int32_t block_id, int num_tokens, uint64_t* checksum) const {
    *checksum = blocks_[block_id].checksum;
    return blocks_[block_id].num_tokens == num_tokens;
  }

 private:
  struct Block {
    uint64_t checksum = 0;
    int32_t num_tokens = 0;
  };
  std::vector<Block> blocks_;
};

}  // namespace headway
