// A thread pool: all threads run one function, in phases.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headway {

// The caller of run() is thread 0; the others sleep between runs.
//
// Threads wait for items of work, not for each other: while a thread has no core, the others do
// what it has not begun. A thread that wakes after a run has ended takes no part in it.
class Pool {
 public:
  // Throws std::system_error if a thread cannot be started; all started threads are joined.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  // Returns when thread 0 has returned from `work`, and so have all others that began it.
  void run(const std::function<void(int)>& work);
  // Adds items to those of a phase that are done; the phase has `count`.
  void finish(std::atomic<int>& done, int num_items, int count) {
    if (done.fetch_add(num_items) + num_items == count) wake();
  }
  // Waits until all items of a phase are done.
  void wait(const std::atomic<int>& done, int count);

 private:
  void loop(int index);
  void close();
  void wake();
  // Spins briefly, because items usually end within microseconds; then sleeps, so that a thread or
  // process that waits for a core gets this one.
  template <typename F>
  void wait_until(const F& is_over);

  const int num_threads_;
  std::atomic<uint32_t> run_{0};
  std::atomic<int> num_inside_{0};
  std::atomic<int> num_asleep_{0};
  bool is_open_ = false;
  bool is_closing_ = false;
  const std::function<void(int)>* work_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
};

}  // namespace headway
