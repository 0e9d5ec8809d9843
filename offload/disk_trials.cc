#include "offload/disk_trials.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <tuple>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"

namespace sluice::offload {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kNearBest = 0.97;
constexpr std::uint64_t kFirstInFlight = 8 * kMiB;
constexpr std::size_t kBlocks[] = {256 * kKiB, 512 * kKiB, kMiB};
constexpr unsigned kMostThreads = 32;
constexpr std::size_t kRounds = 5;
constexpr std::chrono::milliseconds kTimeOfStage{800};  // no round begins later than this
constexpr double kPassSeconds = 0.03;

IoOptions options_for(IoWay way, std::size_t block, std::uint64_t bytes) {
  IoOptions io;
  io.way = way;
  io.block_bytes = block;
  io.queue_depth = static_cast<unsigned>(std::max<std::uint64_t>(1, bytes / block));
  if (way == IoWay::kThreads) io.threads = io.queue_depth;
  return io;
}

double seconds_for_a_byte(const DiskRates& rates) { return 1 / rates.write + 1 / rates.read; }

// A file, and the trials that run on it.
class Trials {
 public:
  Trials(const std::string& folder, std::uint64_t bytes)
      : file_(folder, bytes), memory_(unlimited_, allocator::Purpose::kStaging, kMostInFlight) {
    fill_for_measuring(memory_.bytes());
    const auto service = make_thread_service({});
    // The first writes into preallocated space are slower.
    const DiskRates rates = measure_file(*file_.open_in(*service), bytes, {512 * kKiB, 16}, memory_.bytes());
    const auto quick = static_cast<std::uint64_t>(kPassSeconds * std::min(rates.read, rates.write));
    sample_ = std::min(bytes, std::max(2 * kMostInFlight, quick / kMiB * kMiB));
  }

  // Runs each round over all trials in turn, so that a disturbance does not affect one trial alone.
  void run(std::vector<IoOptions> all) {
    std::vector<Trial> stage;
    for (IoOptions& io : all) stage.push_back({io, service_for(io), {}, {}});
    const Clock::time_point begin = Clock::now();
    for (std::size_t round = 0; round < kRounds && (round == 0 || Clock::now() - begin < kTimeOfStage);
         ++round)
      for (Trial& trial : stage) pass(trial);
    for (Trial& trial : stage) found_.push_back(result_of(trial));
  }
  const std::vector<DiskTrial>& found() const { return found_; }

 private:
  struct Trial {
    IoOptions io;
    std::unique_ptr<IoService> service;
    std::vector<double> write, read;
  };
  static std::unique_ptr<IoService> service_for(const IoOptions& io) {
    return io.way == IoWay::kUring ? make_uring_service(io) : make_thread_service(io);
  }
  // All trials use all of the memory: with less, it would be in the CPU's caches more than in a run.
  static StreamShape shape_of(const IoOptions& io) {
    return {io.block_bytes, kMostInFlight / io.block_bytes};
  }
  void pass(Trial& trial) {
    const auto file = file_.open_in(*trial.service);
    const DiskRates rates = measure_file(*file, sample_, shape_of(trial.io), memory_.bytes());
    trial.write.push_back(rates.write);
    trial.read.push_back(rates.read);
  }
  static DiskTrial result_of(Trial& trial) {
    DiskTrial result{trial.io, {}, 1};
    for (const auto& [rounds, best] :
         {std::pair{&trial.write, &result.rates.write}, {&trial.read, &result.rates.read}}) {
      std::ranges::sort(*rounds);
      *best = rounds->back();
      result.steady = std::min(result.steady, (*rounds)[rounds->size() / 2] / *best);
    }
    return result;
  }
  BareFile file_;  // shared, so that no trial gets a faster region of the disk
  allocator::Ledger unlimited_;
  allocator::Region memory_;
  std::uint64_t sample_ = 0;
  std::vector<DiskTrial> found_;
};

std::vector<IoOptions> ways_and_blocks() {
  std::vector<IoOptions> all;
  for (const std::size_t block : kBlocks) {
    if (uring_available(nullptr)) all.push_back(options_for(IoWay::kUring, block, kFirstInFlight));
    all.push_back(
        options_for(IoWay::kThreads, block, std::min<std::uint64_t>(kFirstInFlight, kMostThreads * block)));
  }
  return all;
}

std::vector<IoOptions> others_under_way(const IoOptions& io) {
  std::vector<IoOptions> all;
  for (const std::uint64_t bytes : {kMostInFlight, kFirstInFlight / 2, kFirstInFlight / 4}) {
    const IoOptions other = options_for(io.way, io.block_bytes, bytes);
    if (io.way == IoWay::kUring || other.threads <= kMostThreads) all.push_back(other);
  }
  return all;
}

}  // namespace

std::uint64_t in_flight(const IoOptions& io) {
  return std::uint64_t{io.way == IoWay::kUring ? io.queue_depth : io.threads} * io.block_bytes;
}

const DiskTrial& best_trial(std::span<const DiskTrial> trials) {
  ensure(!trials.empty(), "the best of no disk trials was asked for");
  double least = seconds_for_a_byte(trials.front().rates);
  for (const DiskTrial& trial : trials) least = std::min(least, seconds_for_a_byte(trial.rates));
  const auto rank = [&](const DiskTrial& trial) {
    const double seconds = seconds_for_a_byte(trial.rates);
    return std::tuple(seconds * kNearBest > least, in_flight(trial.io), trial.io.way == IoWay::kThreads,
                      seconds);
  };
  return *std::ranges::min_element(trials, {}, rank);
}

std::vector<DiskTrial> try_disk(const std::string& folder, std::uint64_t bytes) {
  Trials trials(folder, bytes);
  trials.run(ways_and_blocks());
  trials.run(others_under_way(best_trial(trials.found()).io));
  return trials.found();
}

}  // namespace sluice::offload
