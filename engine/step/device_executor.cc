#include "engine/step/device_executor.h"

#include "engine/step/device_gradients.h"
#include "engine/step/update_spans.h"
#include "optim/device_update.h"

namespace sluice::engine {
namespace {

class DeviceExecutor final : public UpdateExecutor {
 public:
  DeviceExecutor(const Layout& layout, const optim::Optimizer& optimizer, const StateFormat& format,
                 DeviceWork& gpu, Threads& threads)
      : layout_(layout),
        format_(format),
        spans_(layout, format),
        gpu_(gpu),
        threads_(threads),
        update_(gpu.device(), optimizer) {}

  void start(allocator::Ledger& /*ledger*/) override {}
  void begin(const ChunkWork& work, Done done) override {
    std::exception_ptr error;
    try {
      if (work.chunk) queue(work, *work.chunk);
    } catch (...) {
      error = std::current_exception();
    }
    done(error);
  }
  Threads& threads() override { return threads_; }
  double seconds() const override { return 0; }  // of the caller

 private:
  void queue(const ChunkWork& work, std::size_t chunk);

  const Layout& layout_;
  const StateFormat& format_;
  const UpdateSpans spans_;
  DeviceWork& gpu_;
  Threads& threads_;
  optim::DeviceUpdate update_;
};

void DeviceExecutor::queue(const ChunkWork& work, std::size_t chunk) {
  const UnitId unit = work.update.unit;
  const ElementRange elements = format_.shards().chunk(unit, chunk);
  const auto bytes_of = [&](const void* data, Dtype type) {
    return DeviceWork::Memory{static_cast<const std::byte*>(data), elements.size() * size_of(type)};
  };
  const DeviceWork::Memory gradient = bytes_of(work.gradient.data, work.gradient.type);
  std::vector<DeviceWork::Memory> written = {
      bytes_of(work.parameters.at(elements.begin - work.first_parameter).data, work.parameters.type)};
  if (format_.chunk_bytes(unit, chunk) > 0) written.push_back({work.state, format_.chunk_bytes(unit, chunk)});
  std::vector<DeviceWork::Memory> read = {gradient};
  const std::uint32_t* const refused = work.update.refused;
  if (refused != nullptr) read.push_back(DeviceGradients::memory_of(refused));
  gpu_.queue(gpu_.updates(), read, written, [&] {
    for (ParameterId p = work.bucket.first; p < work.bucket.end; ++p) {
      if (!spans_.is_updated(work.update, p)) continue;
      const Slice slice = format_.shards().slice(p, chunk);
      if (slice.count > 0)
        update_.apply(gpu_.updates(), spans_.hyperparameters_of(work.update, p), spans_.span_of(work, slice),
                      refused);
    }
  });
}

}  // namespace

std::unique_ptr<UpdateExecutor> make_device_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, DeviceWork& gpu,
                                                     Threads& threads) {
  return std::make_unique<DeviceExecutor>(layout, optimizer, format, gpu, threads);
}

}  // namespace sluice::engine
