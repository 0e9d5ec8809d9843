#include <memory>

#include "allocator/memory.h"
#include "bindings/cli/bench.h"
#include "bindings/cli/fio.h"
#include "core/bytes.h"
#include "core/error.h"
#include "models/training_setup.h"

namespace sluice::cli {
namespace {

constexpr std::uint64_t kSize = kGiB;
constexpr std::size_t kCall = 8 * kMiB;  // of a record, as the update pipeline's

using offload::DiskRates;
using offload::StreamShape;

std::vector<double> numbers(const DiskRates& rates) { return {rates.write, rates.read}; }

class DiskBench {
 public:
  DiskBench(const BenchOptions& options, BenchReport& report)
      : report_(report),
        shape_{options.block, static_cast<std::size_t>(options.depth)},
        calls_{round_up(std::max<std::size_t>(kCall, shape_.block), offload::RecordStore::kBlock), 0},
        bytes_(round_up(options.size, calls_.block)),
        service_(offload::make_io_service({static_cast<unsigned>(options.depth), options.block})) {
    // Twice what the depth needs, so that the queue never runs empty between two calls.
    calls_.depth = std::max<std::size_t>(2, 2 * divide_up(shape_.bytes(), calls_.block));
    store_ = std::make_unique<offload::RecordStore>(
        *service_, std::vector<offload::DiskFolder>{{options.folder, bytes_}}, ledger_);
    record_ = store_->define("bench", bytes_, allocator::Purpose::kStaging);
    store_->allocate();
    memory_ =
        allocator::Region(ledger_, allocator::Purpose::kStaging, std::max(calls_.bytes(), shape_.bytes()));
    offload::fill_for_measuring(memory_.bytes());
    begin_bare(options.folder);
  }

  void measure(double seconds, BenchProgress& progress) {
    std::vector<BenchWork> works = {
        {"records", [this] {
           return numbers(offload::measure_record(*store_, record_, bytes_, calls_, memory_.bytes()));
         }}};
    if (bare_)
      works.push_back({"io_uring", [this] { return numbers(bare_->measure(shape_, memory_.bytes())); }});
    if (bare_ && has_fio_) works.push_back({"fio", [this] { return numbers(fio()); }});
    const auto found = medians_in_turn(works, seconds, progress);
    for (std::size_t limit = 1; limit < works.size(); ++limit)
      for (std::size_t i = 0; i < 2; ++i)
        report_.rows.push_back({i == 0 ? "write" : "read", BenchUnit::kBytesPerSecond, found[0][i],
                                found[limit][i],
                                works[limit].name + (limit == 1 ? " alone, no checksums" : ", io_uring")});
    if (works.size() == 1)
      fail(ErrorCode::kIo, "{}; without it, {:.2f} GB/s are written and {:.2f} GB/s read by {}",
           report_.notes.front(), found[0][0] / 1e9, found[0][1] / 1e9, service_->name());
  }

  Json settings(const std::string& folder) const {
    return {{"folder", folder},           {"bytes", bytes_},      {"block", shape_.block},
            {"depth", shape_.depth},      {"call", calls_.block}, {"calls", calls_.depth},
            {"service", service_->name()}};
  }

 private:
  void begin_bare(const std::string& folder) {
    try {
      bare_ = std::make_unique<offload::BareFile>(folder, bytes_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kIo) throw;
      report_.notes.push_back(fmt::format("there is no limit to hold this against: {}", error.what()));
      return;
    }
    std::string why;
    has_fio_ = fio_rates(bare_->path(), bytes_, shape_, &why).has_value();
    if (!has_fio_) report_.notes.push_back(why);
  }

  DiskRates fio() {
    std::string why;
    const auto rates = fio_rates(bare_->path(), bytes_, shape_, &why);
    if (!rates) fail(ErrorCode::kIo, "{}", why);
    return *rates;
  }

  BenchReport& report_;
  StreamShape shape_, calls_;
  std::uint64_t bytes_;
  allocator::Ledger ledger_;
  std::unique_ptr<offload::IoService> service_;
  std::unique_ptr<offload::RecordStore> store_;
  offload::RecordId record_ = 0;
  allocator::Region memory_;
  std::unique_ptr<offload::BareFile> bare_;
  bool has_fio_ = false;
};

void check(const BenchOptions& options) {
  if (options.size > std::uint64_t{1} << 60)
    fail(ErrorCode::kInvalidArgument, "--size: {} is more than any disk has", format_size(options.size));
  if (options.folder.empty()) fail(ErrorCode::kInvalidArgument, "say which disk: sluice bench disk FOLDER");
  if (options.block % kDiskBlock != 0 || options.block > 64 * kMiB)
    fail(ErrorCode::kInvalidArgument, "--block: a multiple of {} bytes up to 64 MiB is needed, {} was given",
         kDiskBlock, options.block);
  if (options.depth > 256)
    fail(ErrorCode::kInvalidArgument, "--depth: a number from 1 to 256 is needed, {} was given",
         options.depth);
  std::vector<offload::DiskFolder> both = {
      {options.folder, 2 * options.size}};  // the store's file and the bare one
  models::resolve_disk(both, "", 0);
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
