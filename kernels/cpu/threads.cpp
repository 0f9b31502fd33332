// One job at a time, published in one word: its number, and which of its chunks nobody has taken.
//
//   caller:  describe the job -> word = (number, halves) -> wake who sleeps -> take chunks -> wait
//            for the chunks that others took
//   helper:  word has chunks? take one, run it : spin a while, then sleep
//
// Chunks are two halves. A thread takes those of its own half in ascending order, so that what it
// prefetched past the end of one is the beginning of its next; then the other's, likewise.
//
// NOTE: what describes a job is read only by who holds one of its chunks, and the job cannot end
// before that chunk does.
#include "threads.h"

#include <ATen/Parallel.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pdserve {
namespace {

// Longer than what lies between two regions of a step, shorter than anybody would notice.
constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr int kSpinsPerLook = 32;  // at the clock

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Whether `done` became true within kSpinTime.
template <typename F>
bool spin_until(const F& done) {
  if (done()) return true;
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      pause();
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// Of a job: the chunks [first[h], end[h]) of both halves.
struct Chunks {
  static constexpr int kBits = 12;
  static constexpr uint64_t kMask = (1 << kBits) - 1;

  uint64_t first[2], end[2];

  static Chunks of(uint64_t word) {
    return {{word & kMask, word >> 2 * kBits & kMask},
            {word >> kBits & kMask, word >> 3 * kBits & kMask}};
  }
  uint64_t word(uint64_t job) const {
    return job << 4 * kBits | end[1] << 3 * kBits | first[1] << 2 * kBits | end[0] << kBits |
           first[0];
  }
  bool is_empty() const { return first[0] == end[0] && first[1] == end[1]; }

  // There is one.
  uint64_t take(int half) { return first[half] < end[half] ? first[half]++ : first[1 - half]++; }
};

static_assert(kMaxChunks == Chunks::kMask);

struct alignas(64) Helper {
  std::atomic<int32_t> is_awake{1};
  std::atomic<bool> is_wanted{false};
  std::atomic<const BusyFlag*> lender{nullptr};  // null: a thread of our own

  bool may_run() const {
    if (!is_wanted.load(std::memory_order_acquire)) return false;
    const BusyFlag* flag = lender.load(std::memory_order_acquire);
    return !flag || flag->load(std::memory_order_relaxed) == 0;
  }

  void wake() {
    if (is_awake.load() != 0) return;
    is_awake.store(1);
    is_awake.notify_one();
  }
};

class Pool {
 public:
  void set_lent(std::vector<const BusyFlag*> flags) {
    const std::lock_guard lock(caller_);
    // NOTE: nobody may look at a flag that is about to be unmapped.
    for (auto& helper : helpers_) helper->is_wanted = false;
    for (auto& helper : helpers_) helper->lender = nullptr;
    lent_ = std::move(flags);
    num_lent_ = static_cast<int64_t>(lent_.size());
    num_configured_ = -1;
  }

  int64_t num_lent() const { return num_lent_.load(std::memory_order_relaxed); }

  void run(int64_t num_chunks, const void* context, ChunkFn f) {
    std::unique_lock lock(caller_, std::try_to_lock);
    if (!lock) {
      for (int64_t i = 0; i < num_chunks; ++i) f(context, i);
      return;
    }
    configure(num_threads() - 1);
    context_ = context;
    f_ = f;
    unfinished_.store(static_cast<int32_t>(num_chunks), std::memory_order_relaxed);
    const auto end = static_cast<uint64_t>(num_chunks), half = (end + 1) / 2;
    word_.store(Chunks{{0, half}, {half, end}}.word(++job_));
    int64_t wanted = num_chunks - 1;
    for (auto& helper : helpers_) {
      if (wanted == 0) break;
      if (!helper->may_run()) continue;
      helper->wake();
      --wanted;
    }
    while (run_one(0)) {
    }
    wait_for_others();
  }

 private:
  // Our own threads come first, then one for each flag.
  void configure(int64_t num_helpers) {
    if (num_helpers == num_configured_) return;
    num_configured_ = num_helpers;
    while (static_cast<int64_t>(helpers_.size()) < num_helpers && start_helper()) {
    }
    const int64_t num_own = num_helpers - static_cast<int64_t>(lent_.size());
    for (int64_t i = 0; i < static_cast<int64_t>(helpers_.size()); ++i) {
      helpers_[i]->lender = i >= num_own && i < num_helpers ? lent_[i - num_own] : nullptr;
      helpers_[i]->is_wanted = i < num_helpers;
    }
  }

  // False: the system allows no more threads. Regions are computed by those that there are.
  bool start_helper() {
    Helper* helper = helpers_.emplace_back(std::make_unique<Helper>()).get();
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool has_started = true;
    try {
      std::thread([this, helper, half = static_cast<int>(helpers_.size() % 2)] {
#if defined(__linux__)
        pthread_setname_np(pthread_self(), "pdserve-helper");
#endif
        help(*helper, half);
      }).detach();
    } catch (const std::system_error&) {
      helpers_.pop_back();
      has_started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return has_started;
  }

  [[noreturn]] void help(Helper& self, int half) {
    for (;;) {
      while (self.may_run() && run_one(half)) {
      }
      if (self.may_run() && spin_until([&] { return has_chunks() || !self.may_run(); })) continue;
      self.is_awake.store(0);
      // NOTE: looks again after it said that it sleeps; the caller publishes, then looks who does.
      if (!(self.may_run() && has_chunks())) self.is_awake.wait(0);
      self.is_awake.store(1);
    }
  }

  bool has_chunks() const { return !Chunks::of(word_.load()).is_empty(); }

  bool run_one(int half) {
    uint64_t word = word_.load(), chunk;
    Chunks left;
    do {
      left = Chunks::of(word);
      if (left.is_empty()) return false;
      chunk = left.take(half);
    } while (!word_.compare_exchange_weak(word, left.word(word >> 4 * Chunks::kBits)));
    f_(context_, static_cast<int64_t>(chunk));
    // Sleeping is for when the system stopped a helper in the middle of a chunk.
    if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) unfinished_.notify_all();
    return true;
  }

  void wait_for_others() {
    if (spin_until([&] { return unfinished_.load() == 0; })) return;
    caller_sleeps_ = true;
    for (int32_t left = unfinished_.load(); left != 0; left = unfinished_.load())
      unfinished_.wait(left);
    caller_sleeps_ = false;
  }

  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<int32_t> unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<int64_t> num_lent_{0};
  std::mutex caller_;
  const void* context_ = nullptr;
  ChunkFn f_ = nullptr;
  uint64_t job_ = 0;
  int64_t num_configured_ = -1;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::vector<const BusyFlag*> lent_;
};

// NOTE: never destroyed, for its threads run until the process ends. A process that was forked has
// none of them, and perhaps a region that nobody ends: it begins anew, and borrows from nobody.
Pool& pool() {
  static std::atomic<Pool*> instance = [] {
    pthread_atfork(nullptr, nullptr, [] { instance = new Pool; });
    return new Pool;
  }();
  return *instance.load(std::memory_order_acquire);
}

}  // namespace

int64_t num_threads() { return at::get_num_threads() + pool().num_lent(); }

void set_lent_threads(std::vector<const BusyFlag*> flags) { pool().set_lent(std::move(flags)); }

void run_chunks(int64_t num_chunks, const void* context, ChunkFn f) {
  if (num_chunks == 1 || num_threads() == 1) {
    for (int64_t i = 0; i < num_chunks; ++i) f(context, i);
    return;
  }
  pool().run(num_chunks, context, f);
}

}  // namespace pdserve
