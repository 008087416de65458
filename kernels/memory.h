// Scratch memory reused between steps, work counters, a profiling timer.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "headway.h"

namespace headway {

template <typename T>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  // Returns room for at least `count` numbers; the old contents are lost.
  void reserve(int64_t count) {
    if (count <= count_) return;
    std::free(data_);
    count_ = count + count / 4;
    const size_t bytes = (size_t(count_) * sizeof(T) + 4095) / 4096 * 4096;
    data_ = static_cast<T*>(std::aligned_alloc(4096, bytes));
    if (!data_) {
      count_ = 0;
      throw std::bad_alloc();
    }
  }
  T* get() { return data_; }
  T& operator[](int64_t at) { return data_[at]; }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// On its own cache line, because threads count concurrently.
struct alignas(64) Counter {
  std::atomic<int> next{0};
};

class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), last_(Clock::now()) {}
  // Adds the time since the last call to `part`.
  void lap(HwPart part) {
    if (!seconds_) return;
    const auto now = Clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point last_;
};

}  // namespace headway
