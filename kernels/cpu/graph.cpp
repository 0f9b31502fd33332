// See graph.h.
#include "graph.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace pdserve {
namespace {

constexpr int64_t kAlignment = 64;

Graphs*& current() {
  thread_local Graphs* graphs = nullptr;
  return graphs;
}

}  // namespace

Graphs* recording() { return current(); }

at::Tensor Arena::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t numel =
      std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const int64_t item = static_cast<int64_t>(options.dtype().itemsize());
  const int64_t wanted =
      std::max(kAlignment, (numel * item + kAlignment - 1) / kAlignment * kAlignment);
  char* address = nullptr;
  int64_t size = wanted;
  {
    const std::lock_guard lock(mutex_);
    const auto fit = free_.lower_bound(wanted);
    if (fit != free_.end()) {
      size = fit->first;
      address = fit->second;
      free_.erase(fit);
    } else {
      auto block = std::make_unique<char[]>(wanted + kAlignment);
      const auto start = reinterpret_cast<uintptr_t>(block.get());
      address = block.get() + (kAlignment - start % kAlignment) % kAlignment;
      sizes_[address] = wanted;
      blocks_[address] = std::move(block);
    }
  }
  return at::from_blob(
      address, sizes,
      [self = shared_from_this(), address, size](void*) { self->release(address, size); }, options);
}

void Arena::release(char* address, int64_t size) {
  const std::lock_guard lock(mutex_);
  free_.emplace(size, address);
}

bool Arena::owns(const void* address) const {
  const std::lock_guard lock(mutex_);
  const char* at = static_cast<const char*>(address);
  auto after = sizes_.upper_bound(const_cast<char*>(at));
  if (after == sizes_.begin()) return false;
  --after;
  return at < after->first + after->second;
}

int64_t Arena::num_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [address, size] : sizes_) total += size;
  return total;
}

void Graphs::begin() {
  TORCH_CHECK(!current(), "this thread records already");
  recorded_ = Graph();
  current() = this;
}

int64_t Graphs::end() {
  TORCH_CHECK(current() == this, "this thread does not record here");
  current() = nullptr;
  graphs_.push_back(std::exchange(recorded_, Graph()));
  return static_cast<int64_t>(graphs_.size()) - 1;
}

void Graphs::cancel() {
  TORCH_CHECK(current() == this, "this thread does not record here");
  current() = nullptr;
  recorded_ = Graph();
}

void Graphs::replay(int64_t graph, int64_t start, int64_t stop) const {
  const std::vector<Task>& tasks = graphs_.at(graph).tasks;
  for (int64_t i = start; i < stop; ++i) tasks.at(i)();
}

std::vector<std::tuple<std::string, double>> Graphs::profile(int64_t graph) const {
  std::vector<std::tuple<std::string, double>> times;
  for (const Task& task : graphs_.at(graph).tasks) {
    const auto start = std::chrono::steady_clock::now();
    task();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    // A task is a lambda, whose type is named after the function that it was written in.
    times.emplace_back(c10::demangle(task.target_type().name()), taken.count());
  }
  return times;
}

int64_t Graphs::num_tasks(int64_t graph) const {
  return static_cast<int64_t>(graphs_.at(graph).tasks.size());
}

void Graphs::add(Task task, int64_t task_bytes, std::initializer_list<at::Tensor> read) {
  // NOTE: keeping what lies in the arena would keep its memory from later tasks.
  for (const at::Tensor& tensor : read)
    if (tensor.defined() && !arena_->owns(tensor.const_data_ptr()))
      recorded_.kept.push_back(tensor);
  task_bytes_ += task_bytes + static_cast<int64_t>(sizeof(Task));
  recorded_.tasks.push_back(std::move(task));
}

void Graphs::add_once(const std::vector<const void*>& key, Task task) {
  if (std::find(recorded_.keys.begin(), recorded_.keys.end(), key) != recorded_.keys.end()) return;
  recorded_.keys.push_back(key);
  recorded_.tasks.push_back(std::move(task));
}

at::Tensor Graphs::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return arena_->allocate(sizes, options);
}

at::Tensor Graphs::empty(std::vector<int64_t> sizes, const at::Tensor& like) {
  TORCH_CHECK(current() == this, "this thread does not record here");
  return arena_->allocate(sizes, like.options());
}

at::Tensor Graphs::alias(const at::Tensor& tensor) const {
  if (!arena_->owns(tensor.const_data_ptr())) return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options());
}

}  // namespace pdserve
