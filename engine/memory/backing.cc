#include "engine/memory/backing.h"

#include <utility>

#include "core/error.h"
#include "engine/memory/device_disk.h"
#include "engine/memory/device_shards.h"
#include "engine/memory/host_records.h"
#include "engine/memory/parameter_shards.h"

namespace sluice::engine {
namespace {

class DiskRecord final : public Backing {
 public:
  DiskRecord(offload::RecordStore& disk, const BackingSpec& spec)
      : disk_(disk), record_(disk.define(spec.name, spec.bytes, spec.purpose, spec.block_bytes)) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    disk_.read(record_, offset, into, std::move(done));
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    disk_.write(record_, offset, from, std::move(done));
  }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    disk_.read_unchecked(record_, offset, into, std::move(done));
  }
  void check(std::uint64_t offset, std::span<const std::byte> found, Threads& threads) override {
    disk_.check(record_, offset, found, threads);
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Threads& threads, Done done) override {
    disk_.write(record_, offset, from, threads, std::move(done));
  }

 private:
  offload::RecordStore& disk_;
  const offload::RecordId record_;
};

}  // namespace

std::unique_ptr<Backing> make_disk_record(offload::RecordStore& disk, const BackingSpec& spec) {
  return std::make_unique<DiskRecord>(disk, spec);
}

namespace {

class BackingsOfAnEngine final : public Backings {
 public:
  BackingsOfAnEngine(offload::RecordStore* disk, ParameterShards* shards, HostRecords* host,
                     DeviceDisk* gpu_disk, DeviceShards* gpu_shards)
      : disk_(disk), shards_(shards), host_(host), gpu_disk_(gpu_disk), gpu_shards_(gpu_shards) {}
  std::unique_ptr<Backing> make(const BackingSpec& spec) override {
    if (spec.tier == allocator::Tier::kRanks && gpu_shards_ != nullptr) return gpu_shards_->make(spec.unit);
    if (spec.tier == allocator::Tier::kRanks && shards_ != nullptr) return shards_->make_backing(spec.unit);
    if (spec.tier == allocator::Tier::kHost && host_ != nullptr) return host_->make(spec);
    if (spec.tier == allocator::Tier::kDisk && gpu_disk_ != nullptr && !spec.for_cpu)
      return gpu_disk_->make(spec);
    ensure(spec.tier == allocator::Tier::kDisk && disk_ != nullptr,
           "the plan puts '{}' on the tier '{}', which this engine does not have", spec.name,
           name_of(spec.tier));
    return make_disk_record(*disk_, spec);
  }
  void allocate() override {
    if (disk_ != nullptr) disk_->allocate();
    if (host_ != nullptr) host_->allocate();
    if (gpu_disk_ != nullptr) gpu_disk_->allocate();
  }

 private:
  offload::RecordStore* const disk_;
  ParameterShards* const shards_;
  HostRecords* const host_;
  DeviceDisk* const gpu_disk_;
  DeviceShards* const gpu_shards_;
};

}  // namespace

std::unique_ptr<Backings> make_backings(offload::RecordStore* disk, ParameterShards* shards,
                                        HostRecords* host, DeviceDisk* gpu_disk, DeviceShards* gpu_shards) {
  return std::make_unique<BackingsOfAnEngine>(disk, shards, host, gpu_disk, gpu_shards);
}

}  // namespace sluice::engine
