#include "allocator/range_registry.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/error.h"

namespace sluice::allocator {
namespace {

struct Block {
  std::array<RegisteredRange, 256> ranges;
  std::atomic<Block*> next{nullptr};
};
constinit Block first_block;

// What those who register and unregister know of the table. It is never destroyed, since ranges may end as
// late as the process.
struct Index {
  std::mutex mutex;
  std::unordered_map<std::uintptr_t, RegisteredRange*> used;  // by the first address
  std::vector<RegisteredRange*> free;
  Block* last = &first_block;

  Index() { add_free(first_block); }
  void add_free(Block& block) {
    for (auto range = block.ranges.rbegin(); range != block.ranges.rend(); ++range) free.push_back(&*range);
  }
  RegisteredRange& take(std::uintptr_t begin) {
    if (free.empty()) {
      auto block = std::make_unique<Block>();
      free.reserve(used.size() + block->ranges.size());  // for all, so that none needs memory when it ends
      add_free(*block);
      Block* made = block.release();
      last->next.store(made, std::memory_order_release);
      last = made;
    }
    const bool is_new = used.emplace(begin, free.back()).second;
    ensure(is_new, "two ranges of the allocator begin at {:#x}", begin);
    RegisteredRange& range = *free.back();
    free.pop_back();
    return range;
  }
};
Index& the_index() {
  static Index& made = *new Index;
  return made;
}

// Calls visit(range, begin). Other threads may remove the range meanwhile: what was read from it is valid
// only if its begin is still the same afterwards.
template <class Visit>
void for_each_range(Visit&& visit) {
  for (Block* block = &first_block; block != nullptr; block = block->next.load(std::memory_order_acquire))
    for (RegisteredRange& range : block->ranges)
      if (const std::uintptr_t begin = range.begin.load(); begin != RegisteredRange::kFree)
        visit(range, begin);
}

// A child inherits the addresses but not the pages (MADV_WIPEONFORK), so only the allocator's own mappings
// are replaced here.
void map_ranges_absent_in_child() {
  for_each_range([](RegisteredRange& range, std::uintptr_t begin) {
    (void)::mmap(reinterpret_cast<void*>(begin), range.end.load() - begin, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  });
}

// No other thread is in the index while a process forks: the child would have it half changed, and locked.
void watch_forks_once() {
  static const int error =
      ::pthread_atfork([] { the_index().mutex.lock(); }, [] { the_index().mutex.unlock(); },
                       [] {
                         map_ranges_absent_in_child();
                         the_index().mutex.unlock();
                       });
  if (error != 0) fail(ErrorCode::kIo, "cannot watch for forked children: {}", errno_text(error));
}

}  // namespace

void register_range(const void* begin, std::size_t bytes, std::size_t used, RangeKind kind,
                    std::string_view name) {
  watch_forks_once();
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard lock(the_index().mutex);
  RegisteredRange& range = the_index().take(address);
  const std::size_t length = std::min(name.size(), sizeof range.name - 1);
  std::memcpy(range.name, name.data(), length);
  range.name[length] = '\0';
  range.end = address + bytes;
  range.used = used;
  range.owner = ::getpid();
  range.kind = kind;
  range.service = nullptr;
  range.begin.store(address, std::memory_order_release);
}

void unregister_range(const void* begin) {
  const std::lock_guard lock(the_index().mutex);
  const auto found = the_index().used.extract(reinterpret_cast<std::uintptr_t>(begin));
  ensure(!found.empty(), "no range of the allocator begins at {}", begin);
  found.mapped()->begin = RegisteredRange::kFree;
  the_index().free.push_back(found.mapped());
}

RegisteredRange* range_that_begins_at(const void* begin) {
  const std::lock_guard lock(the_index().mutex);
  const auto found = the_index().used.find(reinterpret_cast<std::uintptr_t>(begin));
  return found == the_index().used.end() ? nullptr : found->second;
}

void retire_range(const void* begin) {
  RegisteredRange* range = range_that_begins_at(begin);
  ensure(range != nullptr, "no range of the allocator begins at {}", begin);
  range->kind = RangeKind::kFormerHome;
  range->service = nullptr;
}

RegisteredRange* find_range(std::uintptr_t address) {
  RegisteredRange* found = nullptr;
  for_each_range([&](RegisteredRange& range, std::uintptr_t begin) {
    if (address >= begin && address < range.end.load() && range.begin.load() == begin) found = &range;
  });
  return found;
}

}  // namespace sluice::allocator
