#include "engine/machine/link_rate.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

constexpr int kRounds = 3;
constexpr double kLongGather = 0.03;  // seconds of a gather so long that its beginning and end count little
constexpr std::size_t kLeastReceived = 256 * kKiB, kMost = 16 * kMiB;  // bytes that a rank receives
// The memory of a rank that receives kLeastReceived, since memory comes in whole huge pages.
constexpr std::uint64_t kLeastMemory = kHugePage;

class Measurement {
 public:
  Measurement(comm::Communicator& communicator, const std::function<void()>& meanwhile)
      : communicator_(communicator), meanwhile_(meanwhile) {}

  // The seconds of the quickest of some gathers with `each` bytes per rank.
  double seconds(std::size_t each) {
    const auto ranks = static_cast<std::size_t>(communicator_.size());
    std::vector<std::size_t> borders(ranks + 1);
    for (std::size_t r = 0; r <= ranks; ++r) borders[r] = r * each;
    bytes_.emplace(ledger_, allocator::Purpose::kStaging, ranks * each);
    double best = once(borders);
    for (int round = 1; round < kRounds; ++round) best = std::min(best, once(borders));
    return slowest(best);
  }

  // The least memory that any rank has for this, so that all ranks gather the same.
  std::uint64_t least(std::uint64_t own) {
    for (const std::string& text :
         communicator_.exchange(call_id(kMemory), kMemory, fmt::format("{}", own), meanwhile_))
      own = std::min<std::uint64_t>(own, std::strtoull(text.c_str(), nullptr, 10));
    return std::max(own, kLeastMemory);
  }

  // Ranks that share a process look at its memory next.
  void end() {
    bytes_.reset();
    slowest(0);
  }

 private:
  double once(const std::vector<std::size_t>& borders) {
    slowest(0);  // all begin together
    const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    TransferGroup group;
    communicator_.all_gather(call_id(kBytes), kBytes, {bytes_->data(), Dtype::kU8}, borders, group.add());
    group.wait(meanwhile_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  double slowest(double own) {
    double most = 0;
    for (const std::string& text :
         communicator_.exchange(call_id(kSpeed), kSpeed, fmt::format("{}", own), meanwhile_))
      most = std::max(most, std::strtod(text.c_str(), nullptr));
    return most;
  }

  static constexpr const char* kMemory = "the memory for measuring the link";
  static constexpr const char* kSpeed = "how fast the link is";
  static constexpr const char* kBytes = "bytes that measure the link";
  comm::Communicator& communicator_;
  const std::function<void()>& meanwhile_;
  allocator::Ledger ledger_;
  std::optional<allocator::Region> bytes_;
};

}  // namespace

Link measure_link(comm::Communicator& communicator, std::uint64_t memory,
                  const std::function<void()>& meanwhile) {
  Measurement measurement(communicator, meanwhile);
  // Gathered bytes reach a host once. All ranks count the same: the bytes that reach the smallest host.
  const comm::Hosts& hosts = communicator.hosts();
  std::size_t others = static_cast<std::size_t>(communicator.size()) - 1;
  for (int rank = 0, least = hosts.ranks(); rank < hosts.ranks() && !hosts.all_on_one(); ++rank) {
    least = std::min(least, static_cast<int>(hosts.with(rank).size()));
    others = static_cast<std::size_t>(hosts.ranks() - least);
  }
  // A rank also holds its own bytes, and those of other ranks on its host.
  const auto taken = [&](std::size_t received) {
    return round_up(static_cast<std::size_t>(communicator.size()) * divide_up(received, others), kHugePage);
  };
  const std::uint64_t most = measurement.least(memory);
  Link link;
  link.latency = measurement.seconds(1);
  for (std::size_t received = kLeastReceived;; received *= 4) {
    const std::size_t each = divide_up(received, others);
    const double seconds = measurement.seconds(each);
    link.bandwidth = static_cast<double>(each * others) / std::max(seconds - link.latency, seconds / 2);
    if (seconds < kLongGather && received < kMost && taken(4 * received) <= most) continue;
    measurement.end();
    return link;
  }
}

}  // namespace sluice::engine
