#include "engine/updates/device_executor.h"

#include <utility>

#include "engine/gradients/device_gradients.h"
#include "engine/updates/update_spans.h"
#include "optim/device_update.h"

namespace sluice::engine {
namespace {

class DeviceExecutor final : public UpdateExecutor {
 public:
  DeviceExecutor(const Layout& layout, const optim::Optimizer& optimizer, const StateFormat& format,
                 DeviceWork& gpu, Threads& threads)
      : format_(format),
        spans_(layout, format),
        gpu_(gpu),
        threads_(threads),
        update_(gpu.device(), optimizer) {}

  void start(allocator::Ledger& /*ledger*/) override {}
  void begin(const ChunkWork& work, Done done) override {
    std::exception_ptr error;
    try {
      if (work.chunk) take(work, *work.chunk);
      if (work.chunk && !work.goes_on) queue(work.update.refused);
    } catch (...) {
      error = std::current_exception();
      taken_ = {};
    }
    done(error);
  }
  Threads& threads() override { return threads_; }
  double seconds() const override { return 0; }  // the caller's threads spend none

 private:
  using Memory = DeviceWork::Memory;
  // Consecutive works, which are queued together.
  struct Taken {
    std::vector<optim::DeviceUpdate::Part> parts;
    Memory gradient, parameters, state;
  };
  void take(const ChunkWork& work, std::size_t chunk);
  void queue(const std::uint32_t* refused);

  const StateFormat& format_;
  const UpdateSpans spans_;
  DeviceWork& gpu_;
  Threads& threads_;
  optim::DeviceUpdate update_;
  Taken taken_;
};

void DeviceExecutor::take(const ChunkWork& work, std::size_t chunk) {
  const UnitId unit = work.update.unit;
  const ElementRange elements = format_.shards().chunk(unit, chunk);
  const auto add = [](Memory& to, const void* data, std::size_t bytes) {
    const auto* const begin = static_cast<const std::byte*>(data);
    if (bytes > 0) to = {to.empty() ? begin : to.data(), begin + bytes};
  };
  const Array parameters = work.parameters.at(elements.begin - work.first_parameter);
  add(taken_.gradient, work.gradient.data, elements.size() * size_of(work.gradient.type));
  add(taken_.parameters, parameters.data, elements.size() * size_of(parameters.type));
  add(taken_.state, work.state, format_.chunk_bytes(unit, chunk));
  for (ParameterId p = work.bucket.first; p < work.bucket.end; ++p) {
    if (!spans_.is_updated(work.update, p)) continue;
    const Slice slice = format_.shards().slice(p, chunk);
    if (slice.count > 0)
      taken_.parts.push_back({spans_.hyperparameters_of(work.update, p), spans_.span_of(work, slice)});
  }
}

void DeviceExecutor::queue(const std::uint32_t* refused) {
  const Taken taken = std::exchange(taken_, {});
  std::vector<Memory> read = {taken.gradient}, written = {taken.parameters};
  if (!taken.state.empty()) written.push_back(taken.state);
  if (refused != nullptr) read.push_back(DeviceGradients::memory_of(refused));
  gpu_.queue(gpu_.updates(), read, written, [&] { update_.apply(gpu_.updates(), taken.parts, refused); });
}

}  // namespace

std::unique_ptr<UpdateExecutor> make_device_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, DeviceWork& gpu,
                                                     Threads& threads) {
  return std::make_unique<DeviceExecutor>(layout, optimizer, format, gpu, threads);
}

}  // namespace sluice::engine
