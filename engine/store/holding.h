#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "core/bytes.h"
#include "engine/store/pager.h"

// Private to the pager's sources.
namespace sluice::engine {

struct Pager::Holding {
  enum class Io : std::uint8_t { kNone, kReading, kWriting };
  HoldingId id = 0;
  HoldingSpec spec;
  allocator::Region region;     // where resident and not exposed
  std::byte* packed = nullptr;  // the same, of a small one: in memory that it shares with others
  allocator::Home home;         // otherwise
  allocator::Home hidden;       // of an exposed one: where its memory is while nobody views it
  int readers = 0, writers = 0;
  std::unique_ptr<Backing> backing;  // of one that is resident: from a plan before this one
  std::size_t contents = 0;          // bytes; 0: none
  bool present = false;  // frames are under the home, and hold the contents once no fetch is under way
  bool backed = false;   // the backing has the contents
  bool parked = false;   // others may read the backing at any time
  int pins = 0;
  Io io = Io::kNone;
  offload::TransferGroup batch;
  std::optional<Leaver> listed;  // where it stands in the pager's lists of what may leave

  bool resident() const { return spec.tier == kComputeTier; }
  bool may_leave() const { return !resident() && present && pins == 0 && io == Io::kNone; }
  bool is_unwritten() const { return contents > 0 && !backed; }
  bool in_region() const { return resident() && !spec.exposed; }
  bool in_shared_pages() const { return resident() && spec.packed; }
  bool is_hidden() const { return hidden.placed() > 0; }
  allocator::Home& arrival() { return spec.exposed ? hidden : home; }
  std::byte* data() const {
    if (in_region()) return packed != nullptr ? packed : region.data();
    return is_hidden() ? hidden.data() : home.data();
  }

  std::size_t transfer_bytes() const {
    return std::min(round_up(contents, offload::RecordStore::kBlock), round_up(spec.bytes, kDiskBlock));
  }
};

}  // namespace sluice::engine
