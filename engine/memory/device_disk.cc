#include "engine/memory/device_disk.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {

// The record as the CPU reads and writes it.
class DeviceDisk::RecordForCpu final : public Backing {
 public:
  RecordForCpu(DeviceDisk& owner, Backing& record) : owner_(owner), record_(record) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    read(&Backing::fetch, offset, into, std::move(done));
  }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    read(&Backing::fetch_unchecked, offset, into, std::move(done));
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
  using Read = void (Backing::*)(std::uint64_t, std::span<std::byte>, Done);
  // Waits until the GPU has copied what was in the buffer before. The thread only begins the read, so that
  // the disk works on it while the thread waits for the next buffer.
  void read(Read how, std::uint64_t offset, std::span<std::byte> into, Done done) {
    if (owner_.work_.is_done(into, DeviceWork::Use::kWrite))
      return (record_.*how)(offset, into, std::move(done));
    const auto wait_and_read = [this, how, offset, into](Done& ended) {
      owner_.work_.wait(into, DeviceWork::Use::kWrite);
      (record_.*how)(offset, into, std::exchange(ended, nullptr));
    };
    owner_.for_cpu_->add(wait_and_read, std::move(done));
  }
  DeviceDisk& owner_;
  Backing& record_;
};

// The disk record verifies checksums.
class DeviceDisk::Record final : public CheckedBacking {
 public:
  using CheckedBacking::store;
  Record(DeviceDisk& owner, const BackingSpec& spec)
      : owner_(owner),
        record_(make_disk_record(owner.disk_, spec)),
        for_cpu_(owner, *record_),
        block_(spec.block_bytes) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    owner_.in_->add([this, offset, into](Done&) { owner_.fetch(transfer(offset, into)); }, std::move(done));
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    const std::span data{const_cast<std::byte*>(from.data()), from.size()};
    owner_.out_->add([this, offset, data](Done&) { owner_.store(transfer(offset, data)); }, std::move(done));
  }

  ForCpu for_cpu() override { return {nullptr, &for_cpu_}; }

 private:
  Transfer transfer(std::uint64_t offset, std::span<std::byte> data) const {
    return {record_.get(), offset, owner_.piece_bytes_ / block_ * block_, data};
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
  for (std::optional<SerialQueue>* const queue : {&in_, &out_, &for_cpu_}) queue->emplace();
}

DeviceDisk::Piece DeviceDisk::piece_of(const Transfer& transfer, std::size_t i, std::size_t place) const {
  const std::size_t at = i * transfer.step;
  return {transfer.offset + at,
          transfer.data.data() + at,
          {memory_.data() + place * piece_bytes_, std::min(transfer.step, transfer.data.size() - at)}};
}

// An error leaves no read in flight: the destructor of a group waits for its transfers.
void DeviceDisk::fetch(const Transfer& transfer) {
  const std::size_t count = divide_up(transfer.data.size(), transfer.step);
  std::array<TransferGroup, kPieces> reads;
  const auto begin = [&](std::size_t i) {
    if (i >= count) return;
    const Piece piece = piece_in(transfer, i);
    work_.wait(piece.host, DeviceWork::Use::kWrite);
    transfer.record->fetch(piece.offset, piece.host, reads[i % kPieces].add());
  };
  begin(0);
  for (std::size_t i = 0; i < count; ++i) {
    begin(i + 1);
    reads[i % kPieces].wait();
    const Piece piece = piece_in(transfer, i);
    work_.copy_in(piece.data, piece.host);
  }
  pieces_before_ += count;
}

void DeviceDisk::store(const Transfer& transfer) {
  const std::size_t count = divide_up(transfer.data.size(), transfer.step);
  std::array<TransferGroup, kPieces> writes;
  const auto begin = [&](std::size_t i) {
    if (i >= count) return;
    writes[i % kPieces].wait();
    const Piece piece = piece_out(transfer, i);
    work_.copy_out(piece.host.data(), {piece.data, piece.host.size()});
  };
  begin(0);
  for (std::size_t i = 0; i < count; ++i) {
    begin(i + 1);
    const Piece piece = piece_out(transfer, i);
    work_.wait(piece.host, DeviceWork::Use::kRead);
    transfer.record->store(piece.offset, piece.host, writes[i % kPieces].add());
  }
  for (TransferGroup& group : writes) group.wait();
}

}  // namespace sluice::engine
