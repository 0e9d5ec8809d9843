#pragma once
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "allocator/range_registry.h"

// Wrappers of the memory system calls (mmap, mremap, madvise) for this room alone.
namespace sluice::allocator {

// A reserved address range without memory, aligned to a huge page and registered under a name while it is
// held.
class Reservation {
 public:
  Reservation() = default;
  // `used` is the number of bytes that the owner asked for; an access beyond them is reported. Throws
  // Error(kBudget) where the process has no addresses left. REQUIRES: bytes is a positive multiple of
  // kHugePage
  Reservation(std::size_t bytes, std::size_t used, RangeKind kind, std::string_view name);
  // Makes adjoining ranges. Each is as large as its `used`, and the last is larger by `reserve`.
  struct Part {
    std::size_t used;
    std::string_view name;
  };
  static std::vector<Reservation> adjoining(const std::vector<Part>& parts, std::size_t reserve,
                                            RangeKind kind);

  std::byte* data() const { return range_.get(); }
  // Gives up ownership: the range stays reserved and registered until give_back_range().
  std::byte* release() { return range_.release(); }
  void unregister();  // removes the range from the registry, as ordinary memory; it is still unmapped later

 private:
  Reservation(std::byte* data, std::size_t bytes, std::size_t used, RangeKind kind, std::string_view name);

  struct GiveBack {
    std::size_t bytes;
    bool registered;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, GiveBack> range_;
};

// The largest range. Beyond it sizes could overflow, and no process has that many addresses.
inline constexpr std::size_t kLargestRange = std::size_t{1} << 46;

void give_back_range(std::byte* data, std::size_t bytes);

// Maps zeroed memory at a reserved range: populated, on huge pages where the system has them, not inherited
// by a forked child, and not in core dumps. Throws Error(kBudget) where the system lacks the memory; its text
// names `what` the memory was for ("a staging buffer").
void take_memory(std::byte* data, std::size_t bytes, std::string_view what);

// Maps ordinary memory, which a forked child inherits and a core dump contains. Throws as take_memory().
void take_ordinary_memory(std::byte* data, std::size_t bytes, std::string_view what);
// Returns the memory of a range to the system. The range stays mapped and reads as zeros.
void drop_memory(std::byte* data, std::size_t bytes);

// Turns a range into reserved addresses without memory; its contents are lost.
void make_absent(std::byte* data, std::size_t bytes);

using Mremap = void* (*)(void* old_address, std::size_t old_size, std::size_t new_size, int flags, ...);

// Moves pages to a range that is reserved or empty; `from` stays mapped, without pages. Moves one extent at a
// time where mremap() cannot move a range of several mappings (Linux before 6.17). Throws, with nothing
// moved, Error(kBudget) where the process has no mappings left and Error(kIo) otherwise. REQUIRES: bytes is a
// multiple of extent; every extent lies within one mapping.
void move_pages(std::byte* from, std::byte* to, std::size_t bytes, std::size_t extent, Mremap mremap_call);
void move_pages(std::byte* from, std::byte* to, std::size_t bytes, std::size_t extent);

}  // namespace sluice::allocator
