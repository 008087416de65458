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

// A thread counts itself asleep before it looks once more; wake() reads that number after the
// change that was waited for. So one of the two sees the other.
template <typename F>
void Pool::wait_until(const F& is_over) {
  for (int i = 0; i < NUM_SPINS; i++) {
    if (is_over()) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  num_asleep_.fetch_add(1);
  changed_.wait(lock, is_over);
  num_asleep_.fetch_sub(1);
}

void Pool::wake() {
  if (num_asleep_.load() == 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
  }
  changed_.notify_all();
}

Pool::Pool(int num_threads) : num_threads_(num_threads) {
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
    run_.fetch_add(1);
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = &work;
    is_open_ = true;
    run_.fetch_add(1);
  }
  wake();
  work(0);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = false;
  }
  wait_until([&] { return num_inside_.load() == 0; });
}

void Pool::wait(const std::atomic<int>& done, int count) {
  wait_until([&] { return done.load() == count; });
}

void Pool::loop(int index) {
  uint32_t seen = 0;
  while (true) {
    wait_until([&] { return run_.load() != seen; });
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_closing_) return;
      seen = run_.load();
      if (!is_open_) continue;
      num_inside_.fetch_add(1);
    }
    (*work_)(index);
    if (num_inside_.fetch_sub(1) == 1) wake();
  }
}

}  // namespace headway
