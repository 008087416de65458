// Tile configuration of the matrix unit (AMX).

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
  // The intrinsic declares only the first bytes as input: without this the compiler may drop the
  // stores of the others.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// The intrinsic does not declare that it reads memory: without this the compiler may move stores
// of the loaded data behind it.
#define HW_TILE_LOAD(tile, from, stride) \
  do {                                   \
    asm volatile("" : : : "memory");     \
    _tile_loadd(tile, from, stride);     \
  } while (0)

}  // namespace
