#include "engine/memory/host_records.h"

#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"

namespace sluice::engine {

void Registration::Unregister::operator()(std::byte* memory) const {
  try {
    device->unregister_host(memory);
  } catch (const Error& error) {  // a fault of the device, which was reported where it was found
    log().debug("{}", error.what());
  }
}

Registration::Registration(Device& device, std::byte* memory, std::size_t bytes)
    : registered_(nullptr, {&device}) {
  if (bytes == 0) return;
  device.register_host(memory, bytes);
  registered_.reset(memory);
}

// Copies by the driver need no checksums. fetch_unchecked() and store() with threads are what updates call,
// so their copies take the streams of chunks.
class HostRecords::Record final : public Backing {
 public:
  Record(HostRecords& owner, const Place& place) : owner_(owner), place_(place) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    copy_in(offset, into, Flow::kUnits, done);
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    copy_out(offset, from, Flow::kUnits, done);
  }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    copy_in(offset, into, Flow::kChunks, done);
  }
  void check(std::uint64_t /*offset*/, std::span<const std::byte> /*found*/, Threads& /*threads*/) override {}
  void store(std::uint64_t offset, std::span<const std::byte> from, Threads& /*threads*/,
             Done done) override {
    copy_out(offset, from, Flow::kChunks, done);
  }

  std::size_t grain() const override { return 1; }
  ForCpu for_cpu() override { return {data(0), nullptr}; }

 private:
  using Flow = DeviceWork::Flow;
  void copy_in(std::uint64_t offset, std::span<std::byte> into, Flow flow, const Done& done) const {
    end_queued(done, [&] { owner_.work_.copy_in(into.data(), {data(offset), into.size()}, flow); });
  }
  void copy_out(std::uint64_t offset, std::span<const std::byte> from, Flow flow, const Done& done) const {
    end_queued(done, [&] { owner_.work_.copy_out(data(offset), from, flow); });
  }
  std::byte* data(std::uint64_t offset) const {
    return owner_.memory_[index(place_.purpose)].data() + place_.offset + offset;
  }
  HostRecords& owner_;
  const Place place_;
};

std::unique_ptr<Backing> HostRecords::make(const BackingSpec& spec) {
  std::size_t& end = bytes_[index(spec.purpose)];
  places_.push_back({spec.purpose, end, spec.bytes, spec.block_bytes});
  end += spec.bytes;
  return std::make_unique<Record>(*this, places_.back());
}

void HostRecords::allocate() {
  for (std::size_t purpose = 0; purpose < bytes_.size(); ++purpose)
    if (bytes_[purpose] > 0)
      memory_[purpose] = RegisteredRegion(ledger_, work_.device(), static_cast<allocator::Purpose>(purpose),
                                          bytes_[purpose]);
  for (const Place& place : places_)
    work_.add({memory_[index(place.purpose)].data() + place.offset, place.bytes}, place.block_bytes);
}

}  // namespace sluice::engine
