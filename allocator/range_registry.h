#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

// Knows which address ranges of this process are the allocator's. Signal handlers and forked children can
// read it: it is a table without locks, whose blocks are never given back.
namespace sluice::allocator {

enum class RangeKind : std::uint8_t { kHome, kBuffer, kFormerHome };

// Brings in what is touched in a range. Safe in a signal handler.
class TouchService {
 public:
  virtual ~TouchService() = default;
  // Waits until the memory is there and returns nullptr, or returns why the address stays absent. The text
  // lives as long as the service.
  virtual const char* bring_in(std::uintptr_t address, bool write) noexcept = 0;
};

struct RegisteredRange {
  std::atomic<std::uintptr_t> begin{0};  // kFree, kWriting, or the first address
  std::atomic<std::uintptr_t> end{0};
  std::atomic<std::size_t> used{0};  // bytes from begin that the owner asked for; what follows is reserve
  std::atomic<pid_t> owner{0};
  std::atomic<RangeKind> kind{RangeKind::kHome};
  std::atomic<TouchService*> service{nullptr};
  char name[96] = {};

  static constexpr std::uintptr_t kFree = 0;
  static constexpr std::uintptr_t kWriting = 1;
};

// Longer names are cut. The first call arranges that a forked child maps all ranges PROT_NONE, so that a
// touch is reported. A child that is made without fork handlers (a bare clone) reads zeros there instead.
void register_range(const void* begin, std::size_t bytes, std::size_t used, RangeKind kind,
                    std::string_view name);
void unregister_range(const void* begin);
// Marks the range of a home that has ended: touches are no longer served, and the report says that it ended.
void retire_range(const void* begin);
// Returns nullptr where the address is in none of the ranges. Safe in a signal handler.
RegisteredRange* find_range(std::uintptr_t address);

}  // namespace sluice::allocator
