#include "huge_pages.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

namespace pdserve {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegion = size_t{64} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Address space that begins at a huge page's border; what nobody writes to takes no memory.
class Region {
 public:
  explicit Region(size_t size) : mapped_size_(size + kHugePage) {
    mapped_ = mmap(nullptr, mapped_size_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    begin_ = round_up(reinterpret_cast<uintptr_t>(mapped_), kHugePage);
    end_ = begin_ + size;
    // Refused where the kernel has no huge pages: ordinary ones do.
    madvise(reinterpret_cast<void*>(begin_), size, MADV_HUGEPAGE);
  }
  ~Region() { munmap(mapped_, mapped_size_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // The next `size` bytes; null: not that many are left.
  void* take(size_t size) {
    if (end_ - begin_ < size) return nullptr;
    void* taken = reinterpret_cast<void*>(begin_);
    begin_ += round_up(size, kAlignment);
    if (begin_ > end_) begin_ = end_;
    return taken;
  }

 private:
  size_t mapped_size_;
  void* mapped_;
  uintptr_t begin_ = 0, end_ = 0;
};

struct Taken {
  std::shared_ptr<Region> region;
  void* memory;
};

Taken take(size_t size) {
  static std::mutex mutex;
  static std::weak_ptr<Region> current;
  const std::lock_guard<std::mutex> lock(mutex);
  auto region = current.lock();
  if (region)
    if (void* memory = region->take(size)) return {std::move(region), memory};
  region = std::make_shared<Region>(round_up(size > kRegion / 2 ? size : kRegion, kHugePage));
  void* memory = region->take(size);
  if (size <= kRegion / 2) current = region;
  return {std::move(region), memory};
}

}  // namespace

at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto size = static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  auto taken = take(size);
  return at::from_blob(
      taken.memory, sizes, [region = std::move(taken.region)](void*) {}, options);
}

}  // namespace pdserve
