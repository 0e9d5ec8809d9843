#include "engine/memory/peer_memory.h"

#include <algorithm>

#include "comm/descriptors.h"
#include "core/error.h"
#include "engine/ranks/agreement.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {

PeerMemory::PeerMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose,
                       std::size_t bytes, bool may_share)
    : device_(&device), memory_(ledger, device, purpose, bytes, may_share) {}

// Every rank takes part in all exchanges, even after an error.
std::string PeerMemory::share(comm::Communicator& communicator, const std::string& name) {
  Descriptor own;
  std::string problem;
  const auto attempt = [&](const auto& action) {
    try {
      action();
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  const std::vector<std::string> sizes = exchange(communicator, name, std::to_string(size()));
  attempt([&] { own = memory_.exported(); });
  comm::Descriptors all = comm::exchange_descriptors(communicator, call_id(name), name,
                                                     problem.empty() ? &own : nullptr, problem);
  if (!all.problem.empty()) return all.problem;
  std::vector<allocator::OthersDeviceRegion> others(all.of_ranks.size());
  std::vector<std::span<const std::byte>> of_ranks(others.size(), {data(), size()});
  attempt([&] {
    for (std::size_t rank = 0; rank < others.size(); ++rank) {
      if (static_cast<int>(rank) == communicator.rank()) continue;
      const std::size_t bytes = std::stoull(sizes[rank]);
      others[rank] = {*device_, all.of_ranks[rank], bytes};
      of_ranks[rank] = {reinterpret_cast<const std::byte*>(others[rank].address()), bytes};
    }
  });
  const std::vector<std::string> problems = exchange(communicator, name, problem);
  const auto first = std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
  if (first != problems.end()) return fmt::format("rank {}: {}", first - problems.begin(), *first);
  others_ = std::move(others);
  of_ranks_ = std::move(of_ranks);
  return {};
}

std::string PeerMemory::refusal(const std::string& problem) {
  return fmt::format(
      "GPUs do not read each other's memory, as they did when the plan was made: {}; let ranks use the "
      "host's memory instead (links=\"host\")",
      problem);
}

}  // namespace sluice::engine
