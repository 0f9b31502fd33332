// Memory that will be read soon, fetched a little at a time beside other work.
//
// A burst of prefetches stops the core as soon as its line buffers are full, and memory is idle
// while nothing is asked of it. So whoever computes takes a share of the list for each of its
// parts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace pdserve {

constexpr int64_t kCacheLine = 64;

class Prefetches {
 public:
  void clear() { count_ = next_ = 0; }

  // What does not fit any more is not fetched.
  void add(const void* from, int64_t num_bytes) {
    if (count_ < kMaxRuns) runs_[count_++] = {static_cast<const char*>(from), num_bytes};
  }

  // Where the next num_bytes are, for the caller to fetch; null: nothing is left. It may read past
  // the end of a run.
  const char* take(int64_t num_bytes) {
    if (next_ == count_) return nullptr;
    Run& run = runs_[next_];
    const char* from = run.from;
    run.from += num_bytes;
    run.num_bytes -= num_bytes;
    if (run.num_bytes <= 0) ++next_;
    return from;
  }

  void fetch(int64_t num_bytes) {
    if (const char* from = take(num_bytes))
      for (int64_t i = 0; i < num_bytes; i += kCacheLine) __builtin_prefetch(from + i, 0, 2);
  }

 private:
  static constexpr int kMaxRuns = 24;

  struct Run {
    const char* from;
    int64_t num_bytes;
  };

  std::array<Run, kMaxRuns> runs_;
  int count_ = 0, next_ = 0;
};

}  // namespace pdserve
