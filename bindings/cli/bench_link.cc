#include <array>
#include <chrono>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/memory.h"
#include "bindings/cli/bench.h"
#include "core/bytes.h"
#include "core/device.h"
#include "core/error.h"
#include "core/log.h"

// `bench link` measures what joins a GPU to the host's memory, as the engine uses it: copies unit by unit,
// beside one copy of everything; and what mapping and registering memory cost.
namespace sluice::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPiece = 32 * kMiB;  // an extent of frames, and about a unit

double seconds_of(const std::function<void()>& call) {
  const Clock::time_point begin = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Host memory that is registered for as long as it lives.
class RegisteredMemory {
 public:
  RegisteredMemory(Device& device, allocator::Ledger& ledger, std::size_t bytes)
      : device_(device), region_(ledger, allocator::Purpose::kStaging, bytes) {
    device_.register_host(region_.data(), region_.size());
  }
  ~RegisteredMemory() {
    try {
      device_.unregister_host(region_.data());
    } catch (const Error& error) {  // the device has had a fault, which the call that found it has reported
      log().debug("{}", error.what());
    }
  }
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;
  std::byte* data() const { return region_.data(); }

 private:
  Device& device_;
  allocator::Region region_;
};

class LinkBench {
 public:
  LinkBench(Device& device, std::size_t bytes)
      : device_(device),
        bytes_(bytes),
        in_(ledger_, device, allocator::Purpose::kStaging, bytes),
        out_(ledger_, device, allocator::Purpose::kStaging, bytes),
        from_(device, ledger_, bytes),
        to_(device, ledger_, bytes),
        pages_(ledger_, allocator::Purpose::kStaging, kPiece) {}

  std::vector<BenchWork> works() {
    return {{"host to GPU", [this] { return copies(true, false); }},
            {"GPU to host", [this] { return copies(false, true); }},
            {"both ways", [this] { return copies(true, true); }},
            {"mapping", [this] { return mapping(); }},
            {"registering", [this] { return registering(); }}};
  }

 private:
  void queue(bool is_in, std::size_t piece) {
    for (std::size_t at = 0; at < bytes_; at += piece) {
      const std::size_t now = std::min(piece, bytes_ - at);
      if (is_in)
        device_.copy_in(in_stream_.get(), in_.address() + at, from_.data() + at, now);
      else
        device_.copy_out(out_stream_.get(), to_.data() + at, out_.address() + at, now);
    }
  }
  double copy_seconds(bool is_in, bool is_out, std::size_t piece) {
    return seconds_of([&] {
      if (is_in) queue(true, piece);
      if (is_out) queue(false, piece);
      device_.synchronize(in_stream_.get());
      device_.synchronize(out_stream_.get());
    });
  }
  // Seconds by pieces, and of one copy in each direction alone.
  std::vector<double> copies(bool is_in, bool is_out) {
    const double pieces = copy_seconds(is_in, is_out, kPiece);
    double alone = 0;
    if (is_in) alone = std::max(alone, copy_seconds(true, false, bytes_));
    if (is_out) alone = std::max(alone, copy_seconds(false, true, bytes_));
    return {pieces, alone};
  }
  // Seconds in which an extent is mapped and unmapped, and in which its bytes are copied to the GPU.
  std::vector<double> mapping() {
    const Device::Extent extent = device_.create_extent(kPiece);
    const DeviceAddress address = device_.reserve_addresses(kPiece);
    const double seconds = seconds_of([&] {
      device_.map(address, kPiece, extent);
      device_.unmap(address, kPiece);
    });
    device_.free_addresses(address, kPiece);
    device_.release_extent(extent);
    return {seconds,
            copy_seconds(true, false, bytes_) * static_cast<double>(kPiece) / static_cast<double>(bytes_)};
  }
  std::vector<double> registering() {
    const double seconds = seconds_of([&] {
      device_.register_host(pages_.data(), pages_.size());
      device_.unregister_host(pages_.data());
    });
    return {seconds,
            copy_seconds(true, false, bytes_) * static_cast<double>(kPiece) / static_cast<double>(bytes_)};
  }

  Device& device_;
  std::size_t bytes_;
  allocator::Ledger ledger_;
  allocator::DeviceRegion in_, out_;
  RegisteredMemory from_, to_;
  allocator::Region pages_;
  Device::Stream in_stream_ = device_.make_stream(true), out_stream_ = device_.make_stream(true);
};

BenchRow copy_row(const BenchWork& work, const std::vector<double>& seconds, std::size_t bytes, int ways) {
  BenchRow row;
  row.name = work.name;
  const double moved = static_cast<double>(bytes) * ways;
  row.reached = moved / seconds[0];
  row.limit = moved / seconds[1];
  row.limit_is = ways == 1 ? "one copy of everything" : "each way alone, at the same time";
  return row;
}

BenchRow call_row(const BenchWork& work, const std::vector<double>& seconds) {
  BenchRow row;
  row.name = fmt::format("{} of {}", work.name, format_size(kPiece));
  row.unit = BenchUnit::kSeconds;
  row.reached = seconds[0];
  row.limit = seconds[1];
  row.limit_is = "the copy of as many bytes to the GPU";
  return row;
}

}  // namespace

BenchReport bench_link(const BenchOptions& options, BenchProgress& progress) {
  const std::size_t bytes = round_up(options.size == 0 ? 512 * kMiB : options.size, kPiece);
  const auto device = open_device(options.device);
  require_free_memory(2 * bytes + kPiece, "give a smaller --size");
  LinkBench bench(*device, bytes);
  const std::vector<BenchWork> works = bench.works();
  const auto seconds = medians_in_turn(works, options.seconds, progress);
  BenchReport report;
  report.bench = "link";
  report.settings = {{"bytes", bytes},
                     {"piece", kPiece},
                     {"gpu", device->info().name},
                     {"pci_address", device->info().pci_address},
                     {"cuda_of_driver", device->info().driver}};
  for (std::size_t i = 0; i < 3; ++i)
    report.rows.push_back(copy_row(works[i], seconds[i], bytes, i == 2 ? 2 : 1));
  for (std::size_t i = 3; i < 5; ++i) report.rows.push_back(call_row(works[i], seconds[i]));
  return report;
}

}  // namespace sluice::cli
