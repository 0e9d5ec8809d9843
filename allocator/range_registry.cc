#include "allocator/range_registry.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"

namespace sluice::allocator {
namespace {

struct Block {
  std::array<RegisteredRange, 256> ranges;
  std::atomic<Block*> next{nullptr};
};
constinit Block first_block;
constinit std::atomic<Block*> first_with_room{&first_block};  // where a search begins

// Calls visit(range, begin). Other threads may remove the range meanwhile: what was read from it is valid
// only if its begin is still the same afterwards.
template <class Visit>
void for_each_range(Visit&& visit) {
  for (Block* block = &first_block; block != nullptr; block = block->next.load(std::memory_order_acquire))
    for (RegisteredRange& range : block->ranges)
      if (const std::uintptr_t begin = range.begin.load(); begin > RegisteredRange::kWriting)
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

void watch_forks_once() {
  static const int error = ::pthread_atfork(nullptr, nullptr, map_ranges_absent_in_child);
  if (error != 0) fail(ErrorCode::kIo, "cannot watch for forked children: {}", errno_text(error));
}

RegisteredRange* claim(Block& block) {
  for (RegisteredRange& range : block.ranges) {
    std::uintptr_t expected = RegisteredRange::kFree;
    if (range.begin.compare_exchange_strong(expected, RegisteredRange::kWriting)) return &range;
  }
  return nullptr;
}

Block* next_of(Block& block) {
  Block* next = block.next.load(std::memory_order_acquire);
  if (next != nullptr) return next;
  auto* made = new Block;
  if (block.next.compare_exchange_strong(next, made)) return made;
  delete made;
  return next;
}

}  // namespace

void register_range(const void* begin, std::size_t bytes, std::size_t used, RangeKind kind,
                    std::string_view name) {
  watch_forks_once();
  RegisteredRange* range = nullptr;
  for (Block* block = first_with_room; range == nullptr;) {
    range = claim(*block);
    if (range == nullptr) first_with_room = block = next_of(*block);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t length = std::min(name.size(), sizeof range->name - 1);
  std::memcpy(range->name, name.data(), length);
  range->name[length] = '\0';
  range->end = address + bytes;
  range->used = used;
  range->owner = ::getpid();
  range->kind = kind;
  range->service = nullptr;
  range->begin.store(address, std::memory_order_release);
}

void unregister_range(const void* begin) {
  bool removed = false;
  for_each_range([&](RegisteredRange& range, std::uintptr_t found) {
    if (found == reinterpret_cast<std::uintptr_t>(begin))
      removed |= range.begin.compare_exchange_strong(found, RegisteredRange::kFree);
  });
  ensure(removed, "no range of the allocator begins at {}", begin);
  first_with_room = &first_block;
}

void retire_range(const void* begin) {
  RegisteredRange* range = find_range(reinterpret_cast<std::uintptr_t>(begin));
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
