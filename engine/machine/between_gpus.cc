#include "engine/machine/between_gpus.h"

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
#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

constexpr const char* kTrial = "a trial of what passes between GPUs";
constexpr std::size_t kMostRead = 64 * kMiB;
constexpr int kTrials = 3;
constexpr int kMostSeconds = 30;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The contents of a rank's memory in the trial: on some systems GPUs read something else, without an error.
std::byte pattern_of(int rank) { return static_cast<std::byte>(0x5A + rank); }

// Memory whose contents tell which rank has filled it, and memory for what others' GPUs have.
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
  // Each rank reads from one other rank at a time, and no two ranks from the same one. Returns bytes a
  // second.
  double read() {
    double least = std::numeric_limits<double>::infinity();
    for (int distance = 1; distance < communicator_.size(); ++distance) {
      const int other = (communicator_.rank() + distance) % communicator_.size();
      double best = 0;
      for (int trial = 0; trial < kTrials; ++trial) best = std::max(best, read(other));
      check(other, read_.address() + read_.size() - kHugePage, kHugePage);
      least = std::min(least, best);
    }
    return least;
  }
  // Each rank sends all others as much, at the same time. Returns bytes a second that a rank receives.
  double exchange(comm::Nccl& nccl) {
    const auto size = static_cast<std::size_t>(communicator_.size());
    const std::size_t each = given_.size() / size / kHugePage * kHugePage;
    std::vector<comm::Nccl::Message> sent, received;
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      if (rank == communicator_.rank()) continue;
      const std::size_t at = static_cast<std::size_t>(rank) * each;
      sent.push_back({rank, reinterpret_cast<DeviceAddress>(given_.data()) + at, each});
      received.push_back({rank, read_.address() + at, each});
    }
    double best = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      const auto begin = std::chrono::steady_clock::now();
      nccl.exchange(stream_.get(), sent, received);
      wait_for_exchange();
      nccl.check();
      best = std::max(best, static_cast<double>((size - 1) * each) / seconds_since(begin));
    }
    for (const comm::Nccl::Message& message : received)
      check(message.rank, message.begin + each - kHugePage, kHugePage);
    return best;
  }

 private:
  double read(int other) {
    const auto begin = std::chrono::steady_clock::now();
    device_.copy(stream_.get(), read_.address(),
                 reinterpret_cast<DeviceAddress>(given_.of(other, given_.data())), given_.size());
    device_.synchronize(stream_.get());
    return static_cast<double>(given_.size()) / seconds_since(begin);
  }
  // Networks that are set up wrongly may let NCCL's kernels wait for ever.
  void wait_for_exchange() {
    const Device::Event exchanged = device_.make_event();
    device_.record(exchanged.get(), stream_.get());
    const auto begin = std::chrono::steady_clock::now();
    while (!device_.is_done(exchanged.get()))
      if (seconds_since(begin) > kMostSeconds)
        fail(ErrorCode::kIo, "NCCL has not sent {} in {} s; see what it says with NCCL_DEBUG=INFO",
             format_size(given_.size()), kMostSeconds);
  }
  void check(int other, DeviceAddress begin, std::size_t bytes) {
    device_.copy_out(stream_.get(), on_host_.data(), begin, bytes);
    device_.synchronize(stream_.get());
    const auto is_other = [&](std::byte byte) { return byte != pattern_of(other); };
    if (std::any_of(on_host_.data(), on_host_.data() + bytes, is_other))
      fail(ErrorCode::kIo, "GPU {} does not get what is in the memory of rank {}'s GPU", device_.info().index,
           other);
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
  BetweenGpus all;
  all.bytes_a_second = own;
  const std::vector<std::string> told =
      exchange(communicator, kTrial, problem.empty() ? fmt::format("{}", own) : "!" + problem);
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    if (told[rank].starts_with('!')) {
      all.bytes_a_second = 0;
      all.problem = fmt::format("rank {}: {}", rank, told[rank].substr(1));
      return all;
    }
    all.bytes_a_second = std::min(all.bytes_a_second, std::strtod(told[rank].c_str(), nullptr));
  }
  return all;
}

// A trial with memory of the same size on all ranks, of at least `least` bytes. Null, with the problem, where
// one of them has too little, or refuses.
std::unique_ptr<Trial> begin(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                             std::uint64_t least, const std::string& refused, std::string& problem) {
  if (communicator.size() > kMostBetweenGpus) {
    problem = fmt::format("there are {} ranks, and a GPU adds up what {} have", communicator.size(),
                          kMostBetweenGpus);
    return nullptr;
  }
  const BetweenGpus room = together(communicator, static_cast<double>(bytes), refused);
  problem = room.problem;
  if (!problem.empty()) return nullptr;
  const auto half = static_cast<std::uint64_t>(room.bytes_a_second) / 2 / kHugePage * kHugePage;
  std::unique_ptr<Trial> trial;
  const std::string taken = problem_of([&] {
    trial = std::make_unique<Trial>(communicator, device,
                                    std::max(least, std::min<std::uint64_t>(half, kMostRead)));
  });
  problem = together(communicator, 0, taken).problem;
  return problem.empty() ? std::move(trial) : nullptr;
}

BetweenGpus try_reads(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                      const std::string& refused) {
  BetweenGpus found;
  if (!communicator.hosts().all_on_one()) {
    found.problem = "ranks are on several hosts";
    return found;
  }
  const auto trial = begin(communicator, device, bytes, kHugePage, refused, found.problem);
  if (trial != nullptr) found.problem = trial->share();
  if (!found.problem.empty()) return found;
  double rate = 0;
  const std::string read = problem_of([&] { rate = trial->read(); });
  return together(communicator, rate, read);
}

BetweenGpus try_nccl(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                     const std::string& refused) {
  BetweenGpus found;
  const std::uint64_t least = static_cast<std::uint64_t>(communicator.size()) * kHugePage;
  const auto trial = begin(communicator, device, bytes, least, refused, found.problem);
  if (trial == nullptr) return found;
  // It takes most of its memory when ranks send each other something for the first time.
  const std::size_t free = device.free_memory();
  std::unique_ptr<comm::Nccl> nccl =
      comm::Nccl::join(communicator, call_id(kTrial), device, {}, found.problem);
  if (nccl == nullptr) return found;
  double rate = 0;
  const std::string exchanged = problem_of([&] { rate = trial->exchange(*nccl); });
  found = together(communicator, rate, exchanged);
  if (!found.problem.empty()) return found;
  found.nccl = std::move(nccl);
  found.nccl_bytes = free - std::min(free, device.free_memory());
  return found;
}

// Rank 0 says what keeps GPUs from it, unless its own options do.
void say(const comm::Communicator& communicator, const char* what, const BetweenGpus& found,
         const std::string& refused) {
  if (found.bytes_a_second == 0 && communicator.rank() == 0 && refused.empty())
    log().info("{}: {}", what, found.problem);
}

}  // namespace

BetweenGpus measure_reads_between_gpus(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                                       const std::string& refused) {
  BetweenGpus found = try_reads(communicator, device, bytes, refused);
  say(communicator, "GPUs read nothing of each other's memory", found, refused);
  return found;
}

BetweenGpus measure_nccl(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                         const std::string& refused) {
  BetweenGpus found = try_nccl(communicator, device, bytes, refused);
  say(communicator, "GPUs exchange nothing by NCCL", found, refused);
  return found;
}

}  // namespace sluice::engine
