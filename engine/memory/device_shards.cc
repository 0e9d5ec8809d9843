#include "engine/memory/device_shards.h"

#include <array>
#include <exception>
#include <utility>
#include <vector>

#include "core/error.h"

namespace sluice::engine {

class DeviceShards::Unit final : public CheckedBacking {
 public:
  using CheckedBacking::store;
  Unit(DeviceShards& owner, UnitId unit) : owner_(owner), unit_(unit) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    ensure(offset == 0, "a partitioned unit is fetched from byte {} on", offset);
    {
      const std::lock_guard lock(owner_.mutex_);
      owner_.jobs_.push_back({unit_, owner_.shards_.expected(unit_), into.data(), std::move(done)});
    }
    owner_.changed_.notify_all();
  }
  void store(std::uint64_t, std::span<const std::byte>, Done) override {
    fail(ErrorCode::kInternal, "partitioned parameters are stored as a whole");
  }

 private:
  DeviceShards& owner_;
  const UnitId unit_;
};

std::unique_ptr<Backing> DeviceShards::make(UnitId unit) { return std::make_unique<Unit>(*this, unit); }

void DeviceShards::start(allocator::Ledger& ledger) {
  memory_ = RegisteredRegion(ledger, gpu_.device(), allocator::Purpose::kStaging, bytes());
  gpu_.add({memory_.data(), bytes()}, StoredShards::kPiece);
  thread_ = std::thread([this] { work(); });
}

DeviceShards::~DeviceShards() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void DeviceShards::work() {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    std::exception_ptr error;
    try {
      fetch(job);
    } catch (...) {
      error = std::current_exception();
    }
    job.done(error);
  }
}

// Errors leave no read under way: a group waits for its transfers when it ends.
void DeviceShards::fetch(const Job& job) {
  const std::vector<ParameterShards::Piece> pieces = shards_.pieces_of(job.unit);
  std::array<TransferGroup, kPieces> reads;
  const auto begin = [&](std::size_t i) {
    if (i >= pieces.size()) return;
    const std::span into{host(pieces_before_ + i), pieces[i].bytes};
    gpu_.wait(into, DeviceWork::Use::kWrite);
    shards_.read(job.unit, job.version, pieces[i], into, reads[i % kPieces].add());
  };
  for (std::size_t i = 0; i < kPieces; ++i) begin(i);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    reads[i % kPieces].wait();
    gpu_.copy_in(job.to + pieces[i].in_unit, {host(pieces_before_ + i), pieces[i].bytes});
    begin(i + kPieces);
  }
  pieces_before_ += pieces.size();
}

}  // namespace sluice::engine
