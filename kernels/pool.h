// A thread pool: all threads run one function, with barriers inside.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headway {

// Spins briefly, because the other threads usually arrive within microseconds; then sleeps, so
// that a process on the same cores (the API process) is not starved.
class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads), missing_(num_threads) {}

  void wait();

 private:
  const int num_threads_;
  std::atomic<int> missing_;
  std::atomic<uint32_t> round_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// The caller of run() is thread 0; the others sleep between runs.
class Pool {
 public:
  // Throws std::system_error if a thread cannot be started; all started threads are joined.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  void run(const std::function<void(int)>& work);
  void sync() { barrier_.wait(); }

 private:
  void loop(int index);
  void close();

  const int num_threads_;
  Barrier barrier_;
  std::atomic<uint32_t> run_{0};
  bool is_closing_ = false;
  const std::function<void(int)>* work_ = nullptr;
  std::mutex mutex_;
  std::condition_variable started_;
  std::vector<std::thread> threads_;
};

}  // namespace headway
