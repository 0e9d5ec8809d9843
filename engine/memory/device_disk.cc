#include "engine/memory/device_disk.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {

// The record for the CPU.
class DeviceDisk::RecordForCpu final : public Backing {
 public:
  RecordForCpu(DeviceDisk& owner, Backing& record) : owner_(owner), record_(record) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    if (is_free(into)) return record_.fetch(offset, into, std::move(done));
    owner_.add(owner_.for_cpu_, {&record_, offset, 0, into.data(), into.size(), std::move(done), true});
  }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    if (is_free(into)) return record_.fetch_unchecked(offset, into, std::move(done));
    owner_.add(owner_.for_cpu_, {&record_, offset, 0, into.data(), into.size(), std::move(done), false});
  }
  void check(std::uint64_t offset, std::span<const std::byte> found, Threads& threads) override {
    record_.check(offset, found, threads);
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    record_.store(offset, from, std::move(done));
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Threads& threads, Done done) override {
    record_.store(offset, from, threads, std::move(done));
  }

 private:
  // Whether the GPU has copied all that was there.
  bool is_free(std::span<std::byte> into) const {
    return owner_.work_.is_done(into, DeviceWork::Use::kWrite);
  }
  DeviceDisk& owner_;
  Backing& record_;
};

// Checksums are compared where the disk is read.
class DeviceDisk::Record final : public CheckedBacking {
 public:
  using CheckedBacking::store;
  Record(DeviceDisk& owner, const BackingSpec& spec)
      : owner_(owner),
        record_(make_disk_record(owner.disk_, spec)),
        for_cpu_(owner, *record_),
        block_(spec.block_bytes) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    owner_.add(owner_.in_, job(offset, into.data(), into.size(), std::move(done)));
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    owner_.add(owner_.out_, job(offset, const_cast<std::byte*>(from.data()), from.size(), std::move(done)));
  }

  ForCpu for_cpu() override { return {nullptr, &for_cpu_}; }

 private:
  Job job(std::uint64_t offset, std::byte* data, std::size_t bytes, Done done) const {
    return {record_.get(), offset, owner_.piece_bytes_ / block_ * block_, data, bytes, std::move(done)};
  }
  DeviceDisk& owner_;
  const std::unique_ptr<Backing> record_;
  RecordForCpu for_cpu_;
  const std::size_t block_;
};

std::unique_ptr<Backing> DeviceDisk::make(const BackingSpec& spec) {
  has_records_ = true;
  return std::make_unique<Record>(*this, spec);
}

std::size_t DeviceDisk::piece_bytes(const Layout& layout, const StateFormat& format) {
  std::size_t largest = offload::RecordStore::kBlock;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    largest = std::max(largest, format.block_bytes(unit));
  return largest;
}

void DeviceDisk::allocate() {
  if (!has_records_) return;
  memory_ = RegisteredRegion(ledger_, work_.device(), allocator::Purpose::kStaging, bytes(piece_bytes_));
  work_.add({memory_.data(), bytes(piece_bytes_)}, piece_bytes_);
  out_.first_piece = kPieces;
  in_.thread = std::thread([this] { work_on(in_, &DeviceDisk::fetch); });
  out_.thread = std::thread([this] { work_on(out_, &DeviceDisk::store); });
  for_cpu_.thread = std::thread([this] { work_on(for_cpu_, &DeviceDisk::wait_and_read); });
}

DeviceDisk::~DeviceDisk() {
  for (Lane* const lane : {&in_, &out_, &for_cpu_}) {
    {
      const std::lock_guard lock(mutex_);
      lane->ends = true;
    }
    lane->changed.notify_all();
    if (lane->thread.joinable()) lane->thread.join();
  }
}

void DeviceDisk::add(Lane& lane, Job job) {
  {
    const std::lock_guard lock(mutex_);
    lane.jobs.push_back(std::move(job));
  }
  lane.changed.notify_all();
}

void DeviceDisk::work_on(Lane& lane, void (DeviceDisk::*transfer)(Job&)) {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      lane.changed.wait(lock, [&] { return lane.ends || !lane.jobs.empty(); });
      if (lane.jobs.empty()) return;
      job = std::move(lane.jobs.front());
      lane.jobs.pop_front();
    }
    std::exception_ptr error;
    try {
      (this->*transfer)(job);
    } catch (...) {
      error = std::current_exception();
    }
    if (job.done) job.done(error);
  }
}

DeviceDisk::Piece DeviceDisk::piece_of(const Lane& lane, const Job& job, std::size_t i) const {
  const std::size_t at = i * job.step;
  const std::size_t piece = lane.first_piece + (lane.pieces_before + i) % kPieces;
  return {job.offset + at,
          job.data + at,
          {memory_.data() + piece * piece_bytes_, std::min(job.step, job.bytes - at)}};
}

// Errors leave no read under way: a group waits for its transfers when it ends.
void DeviceDisk::fetch(Job& job) {
  const std::size_t count = divide_up(job.bytes, job.step);
  std::array<TransferGroup, kPieces> reads;
  const auto begin = [&](std::size_t i) {
    if (i >= count) return;
    const Piece piece = piece_of(in_, job, i);
    work_.wait(piece.host, DeviceWork::Use::kWrite);
    job.record->fetch(piece.offset, piece.host, reads[i % kPieces].add());
  };
  begin(0);
  for (std::size_t i = 0; i < count; ++i) {
    begin(i + 1);
    reads[i % kPieces].wait();
    const Piece piece = piece_of(in_, job, i);
    work_.copy_in(piece.data, piece.host);
  }
  in_.pieces_before += count;
}

void DeviceDisk::store(Job& job) {
  const std::size_t count = divide_up(job.bytes, job.step);
  std::array<TransferGroup, kPieces> writes;
  const auto begin = [&](std::size_t i) {
    if (i >= count) return;
    writes[i % kPieces].wait();
    const Piece piece = piece_of(out_, job, i);
    work_.copy_out(piece.host.data(), {piece.data, piece.host.size()});
  };
  begin(0);
  for (std::size_t i = 0; i < count; ++i) {
    begin(i + 1);
    const Piece piece = piece_of(out_, job, i);
    work_.wait(piece.host, DeviceWork::Use::kRead);
    job.record->store(piece.offset, piece.host, writes[i % kPieces].add());
  }
  for (TransferGroup& group : writes) group.wait();
}

// The disk goes on with the read while the next job waits for the GPU.
void DeviceDisk::wait_and_read(Job& job) {
  const std::span into{job.data, job.bytes};
  work_.wait(into, DeviceWork::Use::kWrite);
  if (job.is_checked)
    job.record->fetch(job.offset, into, job.done);
  else
    job.record->fetch_unchecked(job.offset, into, job.done);
  job.done = nullptr;
}

}  // namespace sluice::engine
