#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "core/bytes.h"
#include "engine/memory/pager.h"

// Private to the pager.
namespace sluice::engine {

struct Pager::Holding {
  enum class Io : std::uint8_t { kNone, kReading, kWriting };
  HoldingId id = 0;
  HoldingSpec spec;
  DeviceWork* gpu = nullptr;          // the pager's
  ComputeRegion region;               // its memory, where it is resident and not exposed
  std::byte* packed = nullptr;        // its memory, where it is also packed: a part of Pager::packed_
  allocator::Home home;               // its address, where it has no region
  allocator::DeviceHome device_home;  // the same, of a GPU
  allocator::Home hidden;             // where the memory of an exposed holding is while nobody views it
  int readers = 0, writers = 0;
  std::unique_ptr<Backing> backing;     // may also be there where it is resident, from an earlier plan
  std::unique_ptr<Backing> as_backing;  // see Pager::gpu_memory(); null until it is asked for
  std::size_t contents = 0;             // in bytes; 0: it has none
  bool present = false;  // it has its memory, which has the contents once no fetch is under way
  bool backed = false;   // the backing has the present contents
  bool parked = false;   // an update may read the backing at any time
  int pins = 0;
  Io io = Io::kNone;
  TransferGroup transfers;
  std::uint64_t transfers_begun = 0;
  std::optional<Leaver> listed;  // its entry in written_ or unwritten_ of the pager

  bool resident() const { return spec.tier == tier_of(gpu); }
  bool may_leave() const { return !resident() && present && pins == 0 && io == Io::kNone; }
  bool is_unwritten() const { return contents > 0 && !backed; }
  bool in_region() const { return resident() && !spec.exposed; }
  bool in_shared_pages() const { return resident() && spec.packed; }
  bool is_hidden() const { return hidden.placed() > 0; }
  std::byte* home_data() const {
    return gpu == nullptr ? home.data() : reinterpret_cast<std::byte*>(device_home.address());
  }
  allocator::Home& arrival() { return spec.exposed ? hidden : home; }
  std::byte* data() const {
    if (in_region()) return packed != nullptr ? packed : region.data();
    return is_hidden() ? hidden.data() : home_data();
  }

  std::span<const std::byte> memory() const { return {data(), spec.bytes}; }

  std::size_t transfer_bytes() const {
    return std::min(round_up(contents, offload::RecordStore::kBlock), spec.backing_bytes());
  }
};

}  // namespace sluice::engine
