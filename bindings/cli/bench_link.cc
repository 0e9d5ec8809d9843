#include <array>
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/memory.h"
#include "bindings/cli/bench.h"
#include "core/bytes.h"
#include "core/device.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/machine/timing.h"
#include "engine/memory/host_records.h"
#include "engine/planner/planner.h"

// `bench link` measures the connection between a GPU and host memory as the engine uses it: copies in pieces
// of a unit's size, compared with one large copy; the cost of mapping and registering memory; and how much
// these delay copies in flight, which the driver may stall meanwhile.
namespace sluice::cli {
namespace {

constexpr const char* kSmaller = "give a smaller --size";
constexpr std::size_t kPiece = engine::kLargestExtentBytes;  // about the size of a unit, too

engine::RegisteredRegion registered(Device& device, allocator::Ledger& ledger, std::size_t bytes) {
  try {
    return {ledger, device, allocator::Purpose::kStaging, bytes};
  } catch (const Error& error) {
    fail(error.code(), "{} (a smaller --size registers less)", error.what());
  }
}

// An extent that is not mapped, and addresses to map it at.
class SpareExtent {
 public:
  explicit SpareExtent(Device& device) : device_(device), extent_(device.create_extent(kPiece)) {
    try {
      address_ = device.reserve_addresses(kPiece);
    } catch (...) {
      device.release_extent(extent_);
      throw;
    }
  }
  ~SpareExtent() {
    try {
      device_.free_addresses(address_, kPiece);
      device_.release_extent(extent_);
    } catch (const Error& error) {  // a device fault, which the failing call has reported
      log().debug("{}", error.what());
    }
  }
  SpareExtent(const SpareExtent&) = delete;
  SpareExtent& operator=(const SpareExtent&) = delete;
  void map_once() {
    device_.map(address_, kPiece, extent_);
    device_.unmap(address_, kPiece);
  }

 private:
  Device& device_;
  Device::Extent extent_;
  DeviceAddress address_ = 0;
};

class LinkBench {
 public:
  LinkBench(Device& device, std::size_t bytes)
      : device_(device),
        bytes_(bytes),
        in_(ledger_, device, allocator::Purpose::kStaging, bytes),
        out_(ledger_, device, allocator::Purpose::kStaging, bytes),
        from_(registered(device, ledger_, bytes)),
        to_(registered(device, ledger_, bytes)),
        pages_(ledger_, allocator::Purpose::kStaging, kPiece),
        spare_(device) {}

  std::vector<BenchWork> works() {
    const auto map = [this] { spare_.map_once(); };
    const auto register_pages = [this] {
      device_.register_host(pages_.data(), pages_.size());
      device_.unregister_host(pages_.data());
    };
    return {{"host to GPU", [this] { return copies(true, false); }},
            {"GPU to host", [this] { return copies(false, true); }},
            {"both ways", [this] { return copies(true, true); }},
            {"mapping", [this, map] { return calls(map); }},
            {"registering", [this, register_pages] { return calls(register_pages); }}};
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
    return engine::seconds_of([&] {
      if (is_in) queue(true, piece);
      if (is_out) queue(false, piece);
      device_.synchronize(in_stream_.get());
      device_.synchronize(out_stream_.get());
    });
  }
  // Returns the seconds of copies in pieces, and of one copy in each direction alone.
  std::vector<double> copies(bool is_in, bool is_out) {
    const double pieces = copy_seconds(is_in, is_out, kPiece);
    double alone = 0;
    if (is_in) alone = std::max(alone, copy_seconds(true, false, bytes_));
    if (is_out) alone = std::max(alone, copy_seconds(false, true, bytes_));
    return {pieces, alone};
  }
  // Queues copies in both directions in pieces, and returns their seconds on the GPU. `meanwhile` is called
  // once they are queued.
  double both_ways(const std::function<void()>& meanwhile) {
    device_.record(begun_.get(), in_stream_.get());
    device_.wait(out_stream_.get(), begun_.get());
    queue(true, kPiece);
    device_.record(in_done_.get(), in_stream_.get());
    queue(false, kPiece);
    device_.record(out_done_.get(), out_stream_.get());
    meanwhile();
    device_.synchronize(in_done_.get());
    device_.synchronize(out_done_.get());
    return std::max(device_.seconds_between(begun_.get(), in_done_.get()),
                    device_.seconds_between(begun_.get(), out_done_.get()));
  }
  // Returns, for a call: its seconds while the GPU is idle; those of copying as many bytes to the GPU; its
  // seconds beside copies in both directions, repeated as long as these take; and the seconds of the copies
  // with and without it.
  std::vector<double> calls(const std::function<void()>& call) {
    const double alone = engine::seconds_of(call);
    const double copied =
        copy_seconds(true, false, bytes_) * static_cast<double>(kPiece) / static_cast<double>(bytes_);
    double beside = 0;
    const double with_calls = both_ways([&] {
      int count = 0;
      const double all = engine::seconds_of([&] {
        do {
          call();
          ++count;
        } while (!device_.is_done(in_done_.get()) || !device_.is_done(out_done_.get()));
      });
      beside = all / count;
    });
    return {alone, copied, beside, with_calls, both_ways([] {})};
  }

  Device& device_;
  std::size_t bytes_;
  allocator::Ledger ledger_;
  allocator::DeviceRegion in_, out_;
  engine::RegisteredRegion from_, to_;
  allocator::Region pages_;
  SpareExtent spare_;
  Device::Stream in_stream_ = device_.make_stream(true), out_stream_ = device_.make_stream(true);
  Device::Event begun_ = device_.make_event(true), in_done_ = device_.make_event(true),
                out_done_ = device_.make_event(true);
};

BenchRow rate_row(std::string name, double moved, double seconds, double limit_seconds,
                  const char* limit_is) {
  BenchRow row;
  row.name = std::move(name);
  row.reached = moved / seconds;
  row.limit = moved / limit_seconds;
  row.limit_is = limit_is;
  return row;
}

BenchRow seconds_row(std::string name, double seconds, double limit_seconds, const char* limit_is) {
  BenchRow row;
  row.name = std::move(name);
  row.unit = BenchUnit::kSeconds;
  row.reached = seconds;
  row.limit = limit_seconds;
  row.limit_is = limit_is;
  return row;
}

void add_rows(const std::vector<BenchWork>& works, const std::vector<std::vector<double>>& seconds,
              std::size_t bytes, std::vector<BenchRow>& rows) {
  const auto each_way = static_cast<double>(bytes);
  for (std::size_t i = 0; i < 2; ++i)
    rows.push_back(rate_row(works[i].name, each_way, seconds[i][0], seconds[i][1], "one copy of everything"));
  rows.push_back(rate_row(works[2].name, 2 * each_way, seconds[2][0], seconds[2][1],
                          "each way alone, at the same time"));
  for (std::size_t i = 3; i < works.size(); ++i) {
    const std::string piece = fmt::format("{} of {}", works[i].name, format_size(kPiece));
    const auto& [alone, copied, beside, with_calls, without] =
        std::tie(seconds[i][0], seconds[i][1], seconds[i][2], seconds[i][3], seconds[i][4]);
    rows.push_back(seconds_row(piece, alone, copied, "the copy of as many bytes to the GPU"));
    rows.push_back(seconds_row(piece + " beside copies", beside, alone, "the same with no copy under way"));
    rows.push_back(rate_row("both ways beside " + works[i].name, 2 * each_way, with_calls, without,
                            "both ways with no such call"));
  }
}

std::unique_ptr<Device> open_chosen(int index) {
  try {
    return open_device(index);
  } catch (const Error& error) {
    fail(error.code(), "--device {}: {}", index, error.what());
  }
}

void require_device_memory(const Device& device, std::size_t bytes) {
  const std::size_t free = device.free_memory();
  if (bytes > free)
    fail(ErrorCode::kBudget, "this measurement needs {} of memory of GPU {} ({}), of which {} are free: {}",
         format_size(bytes), device.info().index, device.info().name, format_size(free), kSmaller);
}

}  // namespace

BenchReport bench_link(const BenchOptions& options, BenchProgress& progress) {
  const std::size_t bytes = round_up(options.size == 0 ? 512 * kMiB : options.size, kPiece);
  const auto device = open_chosen(options.device);
  require_free_memory(2 * bytes + kPiece, kSmaller);
  require_device_memory(*device, 2 * bytes + kPiece);
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
  add_rows(works, seconds, bytes, report.rows);
  return report;
}

}  // namespace sluice::cli
