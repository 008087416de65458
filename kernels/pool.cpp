#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {

namespace {

constexpr int NUM_SPINS = 2000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

void Barrier::wait() {
  if (num_threads_ == 1) return;
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    missing_.store(num_threads_, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      round_.store(round + 1, std::memory_order_release);
    }
    changed_.notify_all();
    return;
  }
  for (int i = 0; i < NUM_SPINS; i++) {
    if (round_.load(std::memory_order_acquire) != round) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != round; });
}

Pool::Pool(int num_threads) : num_threads_(num_threads), barrier_(num_threads) {
  threads_.reserve(num_threads - 1);
  try {
    for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { loop(i); });
  } catch (...) {
    close();  // destroying an unjoined thread ends the process
    throw;
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    run_.fetch_add(1, std::memory_order_release);
  }
  started_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (num_threads_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      run_.fetch_add(1, std::memory_order_release);
    }
    started_.notify_all();
  }
  work(0);
  barrier_.wait();
}

void Pool::loop(int index) {
  uint32_t seen = 0;
  while (true) {
    for (int i = 0; i < NUM_SPINS && run_.load(std::memory_order_acquire) == seen; i++) relax();
    if (run_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      started_.wait(lock, [&] { return run_.load(std::memory_order_acquire) != seen; });
    }
    seen = run_.load(std::memory_order_acquire);
    {
      // The lock orders this read of the work after the writes that announced it.
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_closing_) return;
    }
    (*work_)(index);
    barrier_.wait();
  }
}

}  // namespace headway
