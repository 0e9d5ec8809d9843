#include "core/error.h"
#include "engine/memory/holding.h"
#include "engine/memory/pager.h"

// What a GPU computes with, for the CPU, which updates it.
namespace sluice::engine {
namespace {

class GpuMemory final : public CheckedBacking {
 public:
  using CheckedBacking::store;
  GpuMemory(DeviceWork& gpu, std::byte* data) : gpu_(gpu), data_(data) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    end_queued(done, [&] { gpu_.copy_out(into.data(), {data_ + offset, into.size()}); });
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    end_queued(done, [&] { gpu_.copy_in(data_ + offset, from); });
  }

 private:
  DeviceWork& gpu_;
  std::byte* const data_;
};

}  // namespace

void Pager::entrust(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(!holding.resident() && holding.spec.stored, "'{}' is entrusted, and has no backing",
         holding.spec.name);
  if (holding.io != Holding::Io::kNone) settle(holding);
  if (holding.present && holding.is_unwritten()) {
    begin_transfer(holding, true);
    settle(holding);
  }
  const std::size_t contents = holding.contents;
  outdate(id);
  holding.contents = contents;
}

// Its memory stays where it is for the pager's whole life.
Backing& Pager::gpu_memory(HoldingId id) {
  Holding& holding = *holdings_[id];
  if (!holding.as_backing) holding.as_backing = std::make_unique<GpuMemory>(*gpu_, holding.data());
  return *holding.as_backing;
}

}  // namespace sluice::engine
