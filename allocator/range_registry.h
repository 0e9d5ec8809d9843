#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

// A registry of the allocator's address ranges. Signal handlers and forked children read it: it is a table
// that is read without locks, whose blocks are never freed. Threads change it one after another.
namespace sluice::allocator {

enum class RangeKind : std::uint8_t { kHome, kBuffer, kFormerHome };

// Serves page faults in a range. Safe in a signal handler.
class TouchService {
 public:
  virtual ~TouchService() = default;
  // Waits until the address is accessible and returns null, or returns why it stays absent. The text lives as
  // long as the service.
  virtual const char* bring_in(std::uintptr_t address, bool write) noexcept = 0;
};

struct RegisteredRange {
  std::atomic<std::uintptr_t> begin{0};  // kFree, or the first address
  std::atomic<std::uintptr_t> end{0};
  std::atomic<std::size_t> used{0};  // bytes from begin that the owner asked for; the rest is reserve
  std::atomic<pid_t> owner{0};
  std::atomic<RangeKind> kind{RangeKind::kHome};
  std::atomic<TouchService*> service{nullptr};
  char name[96] = {};

  static constexpr std::uintptr_t kFree = 0;
};

// Truncates longer names. The first call installs a fork handler, by which a child maps all ranges PROT_NONE,
// so that an access is reported. A child made without fork handlers (a bare clone) reads zeros there instead.
void register_range(const void* begin, std::size_t bytes, std::size_t used, RangeKind kind,
                    std::string_view name);
void unregister_range(const void* begin);
// Marks the range of a home that was destroyed: its faults are no longer served, and the report says so.
void retire_range(const void* begin);
// Returns null where no range begins there.
RegisteredRange* range_that_begins_at(const void* begin);
// Returns null where no range contains the address. Safe in a signal handler.
RegisteredRange* find_range(std::uintptr_t address);

}  // namespace sluice::allocator
