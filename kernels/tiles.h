// The shape of the matrix unit's tiles.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void load_config(const TileConfig& config) {
  // The intrinsic names the first bytes only as its input: without this the compiler may leave
  // out the others.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// The intrinsic does not say that it reads memory: without this the compiler may write what is to
// be loaded only afterwards.
#define HW_TILE_LOAD(tile, from, stride) \
  do {                                   \
    asm volatile("" : : : "memory");     \
    _tile_loadd(tile, from, stride);     \
  } while (0)

}  // namespace
