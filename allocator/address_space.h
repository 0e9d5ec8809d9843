#pragma once
#include <cstddef>
#include <string_view>
#include <vector>

#include "allocator/range_registry.h"

// What the allocator asks of the system's memory calls. Private to this room.
namespace sluice::allocator {

// Addresses without memory, aligned to a huge page, registered under a name for as long as they are held.
class Reservation {
 public:
  Reservation() = default;
  // Throws Error(kBudget) where the system has no addresses left. REQUIRES: bytes is a multiple of kHugePage,
  // > 0
  Reservation(std::size_t bytes, std::size_t used, RangeKind kind, std::string_view name);
  // Several that follow each other. Each is as large as what is used of it, and the last as `reserve` more.
  struct Part {
    std::size_t used;
    std::string_view name;
  };
  static std::vector<Reservation> adjoining(const std::vector<Part>& parts, std::size_t reserve,
                                            RangeKind kind);
  ~Reservation();
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::byte* release();  // the range and its registration stay, for give_back_range
  void unregister();     // the memory under it is the process's like any other; the range is still given back

 private:
  Reservation(std::byte* data, std::size_t bytes, std::size_t used, RangeKind kind, std::string_view name);

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  bool registered_ = true;
};

// Beyond it sizes could overflow, and no process has that many addresses.
inline constexpr std::size_t kLargestRange = std::size_t{1} << 46;

void give_back_range(std::byte* data, std::size_t bytes);

// Puts zeroed memory under a reserved range: huge pages where given, not inherited, not dumped, populated.
// Throws Error(kBudget) where the system lacks the memory; what: "a staging buffer", for that text.
void take_memory(std::byte* data, std::size_t bytes, std::string_view what);

// The same, but for ordinary memory: inherited, and dumped.
void take_ordinary_memory(std::byte* data, std::size_t bytes, std::string_view what);
// Gives back what is under a range that stays mapped; it reads as zeros.
void drop_memory(std::byte* data, std::size_t bytes);

// Makes a range reserved addresses again; what was under it is gone.
void make_absent(std::byte* data, std::size_t bytes);

using Mremap = void* (*)(void* old_address, std::size_t old_size, std::size_t new_size, int flags, ...);

// Moves pages from one range to another that is reserved or empty; `from` stays mapped, and empty. Moves
// piece by piece where the system moves no range that consists of several mappings (Linux before 6.17).
// Throws Error(kBudget) where the process has no mappings left and Error(kIo) otherwise; then nothing has
// moved. REQUIRES: bytes is a multiple of piece; every piece lies within one mapping.
void move_pages(std::byte* from, std::byte* to, std::size_t bytes, std::size_t piece, Mremap mremap_call);
void move_pages(std::byte* from, std::byte* to, std::size_t bytes, std::size_t piece);

}  // namespace sluice::allocator
