#include <sys/resource.h>

#include <array>
#include <memory>

#include "allocator/memory.h"
#include "bindings/cli/bench.h"
#include "bindings/cli/fio.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/system.h"
#include "offload/disk_cache.h"
#include "offload/disk_folders.h"

namespace sluice::cli {
namespace {

constexpr std::uint64_t kSize = kGiB;
constexpr std::size_t kMostDepth = 256;
constexpr std::uint64_t kLeastBytes = 4 * kMiB;

using offload::DiskRates;
using offload::StreamShape;

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

offload::IoOptions options_of(const BenchOptions& options) {
  const std::uint64_t sample = std::min<std::uint64_t>(options.size, 256 * kMiB);
  offload::IoOptions io = offload::know_disk(options.folder, sample).io;
  const std::uint64_t bytes = in_flight(io);
  if (options.block != 0) io.block_bytes = options.block;
  const std::uint64_t count = options.depth != 0 ? static_cast<std::uint64_t>(options.depth)
                                                 : std::max<std::uint64_t>(1, bytes / io.block_bytes);
  (io.way == offload::IoWay::kUring ? io.queue_depth : io.threads) = static_cast<unsigned>(count);
  return io;
}

class DiskBench {
 public:
  DiskBench(const BenchOptions& options, BenchReport& report)
      : report_(report),
        io_(options_of(options)),
        shape_{io_.block_bytes, in_flight(io_) / io_.block_bytes},
        calls_{round_up(shape_.block, offload::RecordStore::kBlock), 0},
        bytes_(round_up(options.size, calls_.block)),
        file_(options.folder, bytes_),
        service_(offload::make_io_service(io_)),
        plain_(file_.open_in(*service_)) {
    // The memory holds the transfers in flight, and half as many blocks for checksums that are computed
    // meanwhile. With more memory, less of it would be in caches and page tables; with less, the disk would
    // be idle at times.
    const std::size_t count = divide_up(shape_.bytes(), calls_.block);
    calls_.depth = count + divide_up(count, 2);
    std::vector<std::unique_ptr<offload::File>> files;
    files.push_back(file_.open_in(*service_));
    store_ = std::make_unique<offload::RecordStore>(std::move(files), ledger_);
    record_ = store_->define("bench", bytes_, allocator::Purpose::kStaging);
    store_->allocate();
    memory_ =
        allocator::Region(ledger_, allocator::Purpose::kStaging, std::max(calls_.bytes(), shape_.bytes()));
    offload::fill_for_measuring(memory_.bytes());
  }

  void measure(double seconds, BenchProgress& progress) {
    works_ = {{"records", [this] { return with_processor([this] { return records(); }); }},
              {"the same without checksums", [this] {
                 return with_processor(
                     [this] { return offload::measure_file(*plain_, bytes_, calls_, memory_.bytes()); });
               }}};
    records();  // first writes into preallocated space are slower
    std::string why;
    if (offload::uring_available(&why))
      works_.push_back({"io_uring alone, no checksums",
                        [this] { return numbers(file_.measure(shape_, memory_.bytes())); }});
    else
      why = "there is no io_uring to compare this with: " + why;
    progress.show("looking for fio's best block size, depth and buffers");
    if (why.empty()) best_ = best_fio(file_.path(), bytes_, &why);
    if (best_)
      works_.push_back({fmt::format("fio: write {}, read {}", to_text(best_->write), to_text(best_->read)),
                        [this] { return fio(); }});
    else
      report_.notes.push_back(why);
    report(medians_in_turn(works_, seconds, progress));
  }

  Json settings(const std::string& folder) const {
    Json result = {{"folder", folder},           {"bytes", bytes_},      {"block", shape_.block},
                   {"depth", shape_.depth},      {"call", calls_.block}, {"calls", calls_.depth},
                   {"service", service_->name()}};
    if (best_) result["fio"] = {{"write", to_text(best_->write)}, {"read", to_text(best_->read)}};
    return result;
  }

 private:
  static std::vector<double> numbers(const DiskRates& rates) { return {rates.write, rates.read}; }

  // Also returns the processor seconds for each byte that was moved.
  template <class Pass>
  std::vector<double> with_processor(const Pass& pass) const {
    const double before = processor_seconds();
    std::vector<double> result = numbers(pass());
    result.push_back((processor_seconds() - before) / static_cast<double>(2 * bytes_));
    return result;
  }

  DiskRates records() {
    return offload::measure_record(*store_, record_, bytes_, calls_, memory_.bytes(), threads_);
  }

  std::vector<double> fio() const {
    std::string why;
    const auto rates = fio_rates(file_.path(), bytes_, std::array{best_->write, best_->read}, &why);
    if (!rates) fail(ErrorCode::kIo, "{}", why);
    return *rates;
  }

  void report(const std::vector<std::vector<double>>& found) {
    for (std::size_t limit = 1; limit < works_.size(); ++limit)
      for (std::size_t i = 0; i < 2; ++i)
        report_.rows.push_back({i == 0 ? "write" : "read", BenchUnit::kBytesPerSecond, found[0][i],
                                found[limit][i], works_[limit].name});
    for (BenchRow& row : report_.rows) row.more = {{"processor_seconds_per_gb", 1e9 * found[0][2]}};
    report_.notes.push_back(fmt::format(
        "processor time: {:.3f} s for 1 GB, {:.3f} s without checksums; {} x {} by {}", 1e9 * found[0][2],
        1e9 * found[1][2], shape_.depth, format_size(shape_.block), service_->name()));
  }

  BenchReport& report_;
  offload::IoOptions io_;
  StreamShape shape_, calls_;
  std::uint64_t bytes_;
  allocator::Ledger ledger_;
  offload::BareFile file_;  // shared by all measurements, so that none has a faster region of the disk
  std::unique_ptr<offload::IoService> service_;
  std::unique_ptr<offload::File> plain_;
  std::unique_ptr<offload::RecordStore> store_;
  offload::RecordId record_ = 0;
  Threads threads_{usable_cpus()};
  allocator::Region memory_;
  std::optional<FioBest> best_;
  std::vector<BenchWork> works_;
};

void check(const BenchOptions& options) {
  if (options.size > std::uint64_t{1} << 60)
    fail(ErrorCode::kInvalidArgument, "--size: {} is more than any disk has", format_size(options.size));
  if (options.size < kLeastBytes)
    fail(ErrorCode::kInvalidArgument,
         "--size: {1} was given, but at least {0} are needed, the largest block that is tried",
         format_size(kLeastBytes), format_size(options.size));
  if (options.folder.empty()) fail(ErrorCode::kInvalidArgument, "say which disk: sluice bench disk FOLDER");
  if (options.block % kDiskBlock != 0 || options.block > 64 * kMiB)
    fail(ErrorCode::kInvalidArgument,
         "--block: {1} was given; a multiple of {0} bytes up to 64 MiB is needed", kDiskBlock, options.block);
  if (options.depth > static_cast<int>(kMostDepth))
    fail(ErrorCode::kInvalidArgument, "--depth: {1} was given; a number from 1 to {0} is needed", kMostDepth,
         options.depth);
  std::vector<offload::DiskFolder> disk = {{options.folder, options.size}};
  offload::resolve_disk(disk, "", 0);
}

}  // namespace

BenchReport bench_disk(const BenchOptions& given, BenchProgress& progress) {
  BenchOptions options = given;
  if (options.size == 0) options.size = kSize;
  check(options);
  BenchReport report;
  report.bench = "disk";
  DiskBench bench(options, report);
  bench.measure(options.seconds, progress);
  report.settings = bench.settings(options.folder);
  return report;
}

}  // namespace sluice::cli
