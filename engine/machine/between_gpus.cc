#include "engine/machine/peer_rate.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/memory/host_records.h"
#include "engine/memory/peer_memory.h"
#include "engine/ranks/agreement.h"

namespace sluice::engine {
namespace {

constexpr const char* kTrial = "a trial of what GPUs read of each other";
constexpr std::size_t kMostRead = 64 * kMiB;
constexpr int kTrials = 3;

// The contents of a rank's memory in the trial: on some systems GPUs read something else, without an error.
std::byte pattern_of(int rank) { return static_cast<std::byte>(0x5A + rank); }

class Trial {
 public:
  Trial(comm::Communicator& communicator, Device& device, std::uint64_t each)
      : communicator_(communicator),
        device_(device),
        given_(ledger_, device, allocator::Purpose::kStaging, each),
        read_(ledger_, device, allocator::Purpose::kStaging, each),
        on_host_(allocator::Region(ledger_, allocator::Purpose::kStaging, kHugePage), device) {
    device.fill(stream_.get(), reinterpret_cast<DeviceAddress>(given_.data()),
                pattern_of(communicator.rank()), each);
    device.synchronize(stream_.get());
  }

  std::string share() { return given_.share(communicator_, kTrial); }
  // Each rank reads from one other rank at a time, and no two ranks from the same one.
  double bytes_a_second() {
    double least = std::numeric_limits<double>::infinity();
    for (int distance = 1; distance < communicator_.size(); ++distance) {
      const int other = (communicator_.rank() + distance) % communicator_.size();
      double best = 0;
      for (int trial = 0; trial < kTrials; ++trial) best = std::max(best, read(other));
      check(other);
      least = std::min(least, best);
    }
    return least;
  }

 private:
  double read(int other) {
    const auto begin = std::chrono::steady_clock::now();
    device_.copy(stream_.get(), read_.address(),
                 reinterpret_cast<DeviceAddress>(given_.of(other, given_.data())), given_.size());
    device_.synchronize(stream_.get());
    return static_cast<double>(given_.size()) /
           std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  void check(int other) {
    device_.copy_out(stream_.get(), on_host_.data(), read_.address() + read_.size() - kHugePage, kHugePage);
    device_.synchronize(stream_.get());
    const auto is_other = [&](std::byte byte) { return byte != pattern_of(other); };
    if (std::any_of(on_host_.data(), on_host_.data() + kHugePage, is_other))
      fail(ErrorCode::kIo, "GPU {} does not read what is in the memory of rank {}'s GPU",
           device_.info().index, other);
  }

  comm::Communicator& communicator_;
  Device& device_;
  allocator::Ledger ledger_;
  PeerMemory given_;
  allocator::DeviceRegion read_;
  RegisteredRegion on_host_;
  Device::Stream stream_ = device_.make_stream(true);
};

std::string problem_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// Collective: the least of the rates of all ranks, or the problem of the first one that has any.
BetweenGpus together(comm::Communicator& communicator, double own, const std::string& problem) {
  BetweenGpus all{own};
  const std::vector<std::string> told =
      exchange(communicator, kTrial, problem.empty() ? fmt::format("{}", own) : "!" + problem);
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    if (told[rank].starts_with('!')) return {0, fmt::format("rank {}: {}", rank, told[rank].substr(1))};
    all.bytes_a_second = std::min(all.bytes_a_second, std::strtod(told[rank].c_str(), nullptr));
  }
  return all;
}

BetweenGpus try_between_gpus(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                             const std::string& refused) {
  if (!communicator.hosts().all_on_one()) return {0, "ranks are on several hosts"};
  if (communicator.size() > kMostBetweenGpus)
    return {0, fmt::format("there are {} ranks, and a GPU adds up what {} have", communicator.size(),
                           kMostBetweenGpus)};
  const BetweenGpus room = together(communicator, static_cast<double>(bytes), refused);
  if (!room.problem.empty()) return room;
  const auto half = static_cast<std::uint64_t>(room.bytes_a_second) / 2 / kHugePage * kHugePage;
  std::optional<Trial> trial;
  const std::string taken = problem_of(
      [&] { trial.emplace(communicator, device, std::clamp<std::uint64_t>(half, kHugePage, kMostRead)); });
  if (BetweenGpus found = together(communicator, 0, taken); !found.problem.empty()) return found;
  if (std::string problem = trial->share(); !problem.empty()) return {0, std::move(problem)};
  double rate = 0;
  const std::string read = problem_of([&] { rate = trial->bytes_a_second(); });
  return together(communicator, rate, read);
}

}  // namespace

BetweenGpus measure_between_gpus(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                                 const std::string& refused) {
  BetweenGpus found = try_between_gpus(communicator, device, bytes, refused);
  if (found.bytes_a_second == 0 && communicator.rank() == 0)
    log().info("GPUs read nothing of each other's memory: {}", found.problem);
  return found;
}

}  // namespace sluice::engine
