#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/transfers.h"
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
// thread, before any transfer; the rest as Backing.
class DeviceDisk {
 public:
  DeviceDisk(allocator::Ledger& ledger, DeviceWork& work, offload::RecordStore& disk)
      : ledger_(ledger), work_(work), disk_(disk) {}
  ~DeviceDisk();  // REQUIRES: no transfer is under way
  DeviceDisk(const DeviceDisk&) = delete;
  DeviceDisk& operator=(const DeviceDisk&) = delete;

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
  struct Job {
    Backing* record = nullptr;
    std::size_t offset = 0, step = 0;  // step: the bytes of a piece of this record
    std::byte* data = nullptr;         // of the GPU's, or where the CPU reads for itself
    std::size_t bytes = 0;
    Done done = {};  // is called when the job has ended, unless the job hands it on
    bool is_checked = true;
  };
  // The i-th piece of a job: where it is in the record, on the GPU, and in the host's memory.
  struct Piece {
    std::size_t offset;
    std::byte* data;
    std::span<std::byte> host;
  };
  // A thread, and the jobs that wait for it.
  struct Lane {
    std::size_t first_piece = 0;
    std::size_t pieces_before = 0;  // of fetches before, of whose last one the GPU may still copy
    std::deque<Job> jobs;
    bool ends = false;
    std::condition_variable changed;
    std::thread thread;
  };
  void add(Lane& lane, Job job);
  void work_on(Lane& lane, void (DeviceDisk::*transfer)(Job&));
  Piece piece_of(const Lane& lane, const Job& job, std::size_t i) const;
  void fetch(Job& job);
  void store(Job& job);
  void wait_and_read(Job& job);

  allocator::Ledger& ledger_;
  DeviceWork& work_;
  offload::RecordStore& disk_;
  std::size_t piece_bytes_ = 0;
  bool has_records_ = false;
  RegisteredRegion memory_;
  std::mutex mutex_;  // guards the jobs of all lanes
  Lane in_, out_, for_cpu_;
};

}  // namespace sluice::engine
