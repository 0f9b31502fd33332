// Recording of ops, to be run again without Python and without torch.
//
// While a thread records, ops on it do not compute: each leaves a task on the pointers it was
// given, and its output comes from memory that belongs to the graphs. As tasks run in the order in
// which they were recorded, memory that a tensor gave back while recording is used again by later
// tasks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace pdserve {

using Task = std::function<void()>;

// Memory that recorded outputs lie in; it only ever grows.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);
  bool owns(const void* address) const;
  int64_t num_bytes() const;

 private:
  void release(char* address, int64_t size);

  mutable std::mutex mutex_;  // tensors may die on any thread
  std::map<char*, std::unique_ptr<char[]>> blocks_;
  std::multimap<int64_t, char*> free_;
  std::map<char*, int64_t> sizes_;
};

// Several recordings that share memory, so that only one may be in use at a time.
class Graphs : public torch::CustomClassHolder {
 public:
  // Raises if this thread records already.
  void begin();
  // Ends the recording; returns its number.
  int64_t end();
  // Ends the recording and forgets it.
  void cancel();
  // Tasks [start, stop): what lies between two of them may be done by others, such as a collective.
  void replay(int64_t graph, int64_t start, int64_t stop) const;
  // All of them; what each task is and how long it took, in seconds.
  std::vector<std::tuple<std::string, double>> profile(int64_t graph) const;
  int64_t num_tasks(int64_t graph) const;
  // Tasks of the recording under way.
  int64_t num_recorded() const { return static_cast<int64_t>(recorded_.tasks.size()); }

  // Of intermediate results, and of what tasks hold.
  int64_t num_bytes() const { return arena_->num_bytes() + task_bytes_; }

  // task_bytes: what the task holds.
  void add(Task task, int64_t task_bytes, std::initializer_list<at::Tensor> read);
  // Adds a task unless this recording has one with the same key.
  void add_once(const std::vector<const void*>& key, Task task);
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);
  // Memory for what is done between tasks, as `like` in dtype.
  at::Tensor empty(std::vector<int64_t> sizes, const at::Tensor& like);
  // The same elements, but not kept: later tasks may have the memory when the tensor is gone. To be
  // used between the tasks where it was there.
  at::Tensor alias(const at::Tensor& tensor) const;

 private:
  struct Graph {
    std::vector<Task> tasks;
    std::vector<at::Tensor> kept;
    std::vector<std::vector<const void*>> keys;
  };

  Graph recorded_;
  std::vector<Graph> graphs_;
  int64_t task_bytes_ = 0;  // of all recordings
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();
};

// What this thread records into, or null.
Graphs* recording();

}  // namespace pdserve
