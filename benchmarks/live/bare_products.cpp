// Bare products in registers: the most multiply-adds per second of the thread that calls.

#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int CHAINS = 12;  // independent sums, enough to hide the latency of one product
constexpr int BATCH = 2000;

template <class Run>
double rate_of(double seconds, double per_batch, Run run) {
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  double done = 0, passed = 0;
  do {
    run();
    done += per_batch;
    passed = std::chrono::duration<double>(clock::now() - start).count();
  } while (passed < seconds);
  return done / passed;
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512vnni"))) void run_vnni() {
  __m512i sums[CHAINS], a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (int i = 0; i < BATCH; i++) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = _mm512_dpbusd_epi32(sum, a, b);
      asm volatile("" : "+v"(sum));
    }
  }
}

__attribute__((target("avx2,fma"))) void run_fma() {
  __m256 sums[CHAINS], a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(1e-3f);
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (int i = 0; i < BATCH; i++) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = _mm256_fmadd_ps(a, b, sum);
      asm volatile("" : "+x"(sum));
    }
  }
}

__attribute__((target("avx512f"))) void run_fma512() {
  __m512 sums[CHAINS], a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-3f);
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int i = 0; i < BATCH; i++) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = _mm512_fmadd_ps(a, b, sum);
      asm volatile("" : "+v"(sum));
    }
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t num_rows[16] = {};
};

// Four sums, as many as the kernels keep; inputs and weights stay in their tiles.
__attribute__((target("amx-tile,amx-bf16"))) void run_amx() {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.bytes_per_row[tile] = 64, config.num_rows[tile] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int i = 0; i < BATCH; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#endif

}  // namespace

// Returns multiply-adds per second over about that many seconds; 0 for a kind that is not known.
extern "C" double bare_products(const char* kind, double seconds) {
#if defined(__x86_64__)
  const double chains = double(CHAINS) * BATCH;
  if (!std::strcmp(kind, "int8 VNNI")) return rate_of(seconds, 64 * chains, run_vnni);
  if (!std::strcmp(kind, "fp32 AVX2")) return rate_of(seconds, 8 * chains, run_fma);
  if (!std::strcmp(kind, "fp32 AVX-512")) return rate_of(seconds, 16 * chains, run_fma512);
  if (!std::strcmp(kind, "bf16 AMX")) return rate_of(seconds, 4.0 * 16 * 16 * 32 * BATCH, run_amx);
#endif
  (void)kind, (void)seconds;
  return 0;
}
