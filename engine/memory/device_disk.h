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

// Records on disk of what a GPU computes with. A transfer passes through registered host memory, piece by
// piece: while one piece is copied, the disk has the next one. Two threads do that, one for each direction,
// since they wait for the disk and for the GPU. A fetch has ended for the caller when its last copy is
// queued, a store when the disk has all of it. What the CPU reads for itself may come where the GPU still
// copies what was there before, for which a third thread waits. Thread rule: make() and allocate() from one
// thread, before any transfer; the rest as Backing. REQUIRES: no transfer is under way when it ends.
class DeviceDisk {
 public:
  DeviceDisk(allocator::Ledger& ledger, DeviceWork& work, offload::RecordStore& disk)
      : ledger_(ledger), work_(work), disk_(disk) {}

  // A piece has the size of the largest block of any record.
  static std::size_t piece_bytes(const Layout& layout, const StateFormat& format);
  static constexpr std::size_t bytes(std::size_t piece_bytes) { return 2 * kPieces * piece_bytes; }
  std::unique_ptr<Backing> make(const BackingSpec& spec);
  // Takes the host memory. REQUIRES: the records of the disk have their space, and set_piece() was called.
  void allocate();
  void set_piece(std::size_t bytes) { piece_bytes_ = bytes; }

 private:
  static constexpr std::size_t kPieces = 2;  // of each direction
  class Record;
  class RecordForCpu;
  // Bytes of a record, and where they are on the GPU.
  struct Transfer {
    Backing* record;
    std::size_t offset, step;  // step: the bytes of a piece of this record
    std::span<std::byte> data;
  };
  // The i-th piece of a transfer: where it is in the record, on the GPU, and in the host's memory.
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
  std::size_t pieces_before_ = 0;  // of fetches before, of whose last one the GPU may still copy
  std::optional<SerialQueue> in_, out_, for_cpu_;
};

}  // namespace sluice::engine
