#pragma once
#include <memory>
#include <optional>

#include "core/serial_queue.h"
#include "engine/layout/state_format.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "offload/records.h"

namespace sluice::engine {

// Disk records of what a GPU computes with. A transfer passes through registered host memory in pieces: the
// disk transfers one piece while the GPU copies another. Each direction has a thread, which waits for the
// disk and for the GPU. A fetch completes for its caller when its last copy is queued, a store when the disk
// has all of it. The CPU may read a record into memory from which the GPU still copies; a third thread then
// waits for the GPU before it reads. Thread rule: make() and allocate() from one thread, before any transfer;
// the rest as Backing. REQUIRES: no transfer is in flight when it is destroyed.
class DeviceDisk {
 public:
  DeviceDisk(allocator::Ledger& ledger, DeviceWork& work, offload::RecordStore& disk)
      : ledger_(ledger), work_(work), disk_(disk) {}

  // A piece is as large as the largest block of any record.
  static std::size_t piece_bytes(const Layout& layout, const StateFormat& format);
  static constexpr std::size_t bytes(std::size_t piece_bytes) { return 2 * kPieces * piece_bytes; }
  std::unique_ptr<Backing> make(const BackingSpec& spec);
  // Takes the host memory. REQUIRES: set_piece() was called, and the disk's records have their space.
  void allocate();
  void set_piece(std::size_t bytes) { piece_bytes_ = bytes; }

 private:
  static constexpr std::size_t kPieces = 2;  // per direction
  class Record;
  class RecordForCpu;
  // A range of a record, and the GPU memory that it is copied to or from.
  struct Transfer {
    Backing* record;
    std::size_t offset, step;  // step: the bytes per piece of this record
    std::span<std::byte> data;
  };
  // The i-th piece of a transfer: its offset in the record, its GPU memory and its staging buffer.
  struct Piece {
    std::size_t offset;
    std::byte* data;
    std::span<std::byte> host;
  };
  Piece piece_of(const Transfer& transfer, std::size_t i, std::size_t place) const;
  Piece piece_in(const Transfer& transfer, std::size_t i) const {
    return piece_of(transfer, i, (pieces_before_ + i) % kPieces);
  }
  Piece piece_out(const Transfer& transfer, std::size_t i) const {
    return piece_of(transfer, i, kPieces + i % kPieces);
  }
  void fetch(const Transfer& transfer);
  void store(const Transfer& transfer);

  allocator::Ledger& ledger_;
  DeviceWork& work_;
  offload::RecordStore& disk_;
  std::size_t piece_bytes_ = 0;
  bool has_records_ = false;
  RegisteredRegion memory_;
  std::size_t pieces_before_ = 0;  // of all fetches so far; the GPU may still copy the last ones
  std::optional<SerialQueue> in_, out_, for_cpu_;
};

}  // namespace sluice::engine
