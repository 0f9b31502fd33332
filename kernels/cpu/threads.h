// The threads that kernels compute on: this thread and helpers that wait for it, first spinning for
// a short time, then asleep.
//
// A step is some hundred short parallel regions with little between them. Waking a sleeping thread
// for each costs more than the region; spinning for ever takes the core from whoever needs it. And
// nobody waits for a helper that has not begun: whoever is there takes the next chunk, so a thread
// that the system does not run costs nothing but its own share.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace pdserve {

// Not zero: the lender of a core computes on it itself.
using BusyFlag = std::atomic<int32_t>;

// Threads that a region may get: torch's number, and the lent ones, idle or not at this moment.
int64_t num_threads();

// Compute on one more thread for each flag, while it is zero. The flags may lie in memory that
// other processes write; they must stay readable until they are replaced.
void set_lent_threads(std::vector<const BusyFlag*> flags);

// Of one region.
constexpr int64_t kMaxChunks = 4095;

using ChunkFn = void (*)(const void* context, int64_t chunk);

// Calls f(context, i) once for each i in [0, num_chunks), from several threads; returns when all
// are done. A thread is likely to run chunk i + 1 after chunk i. A region that is entered while
// another thread's runs has no helpers.
void run_chunks(int64_t num_chunks, const void* context, ChunkFn f);

}  // namespace pdserve
