#include <fcntl.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/ranks_handle.h"
#include "comm/mesh.h"
#include "core/system.h"
#include "engine/ranks/call_id.h"

namespace sluice::c {
namespace {

std::chrono::milliseconds time_of(double seconds, std::chrono::milliseconds none, const char* name) {
  constexpr double kMost = 1e9;
  if (!(seconds >= 0 && seconds <= kMost))
    fail(ErrorCode::kInvalidArgument, "options.{} is {}; state seconds, at most {}, or 0 for {} s", name,
         seconds, kMost, std::chrono::duration_cast<std::chrono::seconds>(none).count());
  if (seconds == 0) return none;
  return std::chrono::milliseconds(std::max(1LL, std::llround(seconds * 1000)));
}

std::uint64_t id_of(const char* name) { return engine::call_id(engine::CallKind::kOfCaller, name); }

// Returns the bytes of the rings that one rank maps, to and from each other rank.
std::uint64_t bytes_of_rings(int ranks) {
  return comm::LocalMemory::bytes(ranks, kRing) * 2 / static_cast<std::size_t>(ranks);
}

std::unique_ptr<comm::LocalMemory> memory_of(int descriptor) {
  const int own = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (own < 0) fail(ErrorCode::kIo, "descriptor {} cannot be used: {}", descriptor, errno_text(errno));
  return std::make_unique<comm::LocalMemory>(own);
}

std::vector<std::string> exchange(sluice_ranks& ranks, const char* name, std::string own) {
  return ranks.communicator.exchange(id_of(name), name, own);
}

}  // namespace

comm::Deadlines deadlines_of(const sluice_ranks_options* options) {
  comm::Deadlines deadlines;
  if (options == nullptr) return deadlines;
  const sluice_ranks_options known = known_part(options, "options");
  deadlines.silence = time_of(known.silence, deadlines.silence, "silence");
  deadlines.patience = time_of(known.patience, deadlines.patience, "patience");
  return deadlines;
}

std::uint64_t bytes_of_ranks(int ranks) {
  return (ranks > comm::LocalMemory::kMostRanks ? 0 : bytes_of_rings(ranks)) +
         comm::Communicator::buffer_bytes(ranks);
}

RanksOfEngine::RanksOfEngine(sluice_ranks* ranks) : ranks_(ranks) {
  if (ranks != nullptr && ranks->all.has_engine.exchange(true))
    fail(ErrorCode::kState, "options.ranks serve an engine already; make others, or destroy that engine");
}

RanksOfEngine::~RanksOfEngine() {
  if (ranks_ != nullptr) ranks_->all.has_engine = false;
}

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_ranks::sluice_ranks(std::unique_ptr<sluice::comm::Links> links,
                           const sluice::comm::Deadlines& deadlines, std::uint64_t bytes_of_links,
                           std::unique_ptr<sluice::comm::LocalMemory> the_memory)
    : all(*this),
      link_bytes(bytes_of_links),
      ranks_here(the_memory != nullptr ? the_memory->ranks() : 1),
      memory(std::move(the_memory)),
      made(std::make_unique<sluice::comm::Communicator>(std::move(links), deadlines, ledger)) {}

sluice_ranks::sluice_ranks(sluice::comm::HostLinks links, const sluice::comm::Deadlines& deadlines,
                           std::uint64_t bytes_of_links)
    : all(*this),
      link_bytes(bytes_of_links),
      ranks_here(links.ranks_here),
      made(std::make_unique<sluice::comm::Communicator>(std::move(links.links), deadlines, ledger,
                                                        links.hosts)) {}

sluice_ranks::sluice_ranks(sluice::comm::LaunchedLinks launched, const sluice::comm::Deadlines& deadlines)
    : all(*this),
      link_bytes(launched.bytes),
      ranks_here(launched.host.ranks_here),
      mpi(std::move(launched.mpi)),
      made(std::make_unique<sluice::comm::Communicator>(std::move(launched.host.links),
                                                        deadlines.of_ranks_started_together(), ledger,
                                                        launched.host.hosts)) {}

sluice_ranks::sluice_ranks(sluice_ranks& of, const std::vector<int>& members)
    : all(of.all),
      functions(of.functions),
      link_bytes(of.link_bytes),
      ranks_here(of.ranks_here),
      made(of.communicator.group(members)) {}

std::uint64_t sluice_ranks::bytes() const {
  return link_bytes + sluice::comm::Communicator::buffer_bytes(all.communicator.size());
}

sluice_status sluice_ranks_memory(uint32_t ranks, int* descriptor) {
  return guarded([&] {
    int& out = required(descriptor, "descriptor");
    if (ranks < 2 || ranks > static_cast<uint32_t>(sluice::comm::LocalMemory::kMostRanks))
      sluice::fail(sluice::ErrorCode::kInvalidArgument, "memory for {} ranks is asked for; state 2 to {}",
                   ranks, sluice::comm::LocalMemory::kMostRanks);
    const sluice::comm::LocalMemory memory(static_cast<int>(ranks), kRing);
    const int own = ::fcntl(memory.descriptor(), F_DUPFD_CLOEXEC, 0);
    if (own < 0) sluice::fail(sluice::ErrorCode::kIo, "no descriptor is left: {}", sluice::errno_text(errno));
    out = own;
  });
}

sluice_status sluice_ranks_create_local(int descriptor, uint32_t rank, const sluice_ranks_options* options,
                                        sluice_ranks** ranks) {
  return guarded([&] {
    sluice_ranks*& out = required(ranks, "ranks");
    const sluice::comm::Deadlines deadlines = deadlines_of(options);
    auto memory = memory_of(descriptor);
    const int size = memory->ranks();
    if (rank >= static_cast<uint32_t>(size))
      sluice::fail(sluice::ErrorCode::kInvalidArgument, "rank {} joins, and the memory is of ranks 0 to {}",
                   rank, size - 1);
    auto links = sluice::comm::make_local_links(*memory, static_cast<int>(rank));
    out = new sluice_ranks(std::move(links), deadlines, bytes_of_rings(size), std::move(memory));
  });
}

sluice_status sluice_ranks_create_mpi(const sluice_ranks_options* options, sluice_ranks** ranks) {
  return guarded([&] {
    sluice_ranks*& out = required(ranks, "ranks");
    const sluice::comm::Deadlines deadlines = deadlines_of(options);
    const auto launcher = sluice::comm::find_mpi_launcher();
    if (!launcher)
      sluice::fail(
          sluice::ErrorCode::kState,
          "no launcher of MPI has started this process; start it by mpirun or srun --mpi=pmix, or make "
          "its ranks otherwise");
    if (launcher->ranks == 1)
      sluice::fail(sluice::ErrorCode::kState,
                   "{} has started one process, which trains alone; state no ranks for its engine",
                   launcher->name);
    out = new sluice_ranks(sluice::comm::join_launched(*launcher, {}, kRing, deadlines.patience), deadlines);
  });
}

void sluice_ranks_destroy(sluice_ranks* ranks) { destroy(ranks); }

sluice_status sluice_ranks_along(sluice_ranks* ranks, const char* mesh, const char* axis,
                                 sluice_ranks** group) {
  return guarded([&] {
    sluice_ranks*& out = required(group, "group");
    const auto axes = sluice::comm::Mesh::parse(&required(mesh, "mesh"));
    const std::string along = &required(axis, "axis");
    const int size = ranks == nullptr ? 1 : ranks->communicator.size();
    if (axes.ranks() != size)
      sluice::fail(sluice::ErrorCode::kInvalidArgument,
                   "the mesh '{}' is of {} ranks, and there are {}; name sizes whose product is that", mesh,
                   axes.ranks(), size);
    out = axes.size(along) == 1 ? nullptr
                                : new sluice_ranks(*ranks, axes.along(ranks->communicator.rank(), along));
  });
}

sluice_status sluice_ranks_rank(const sluice_ranks* ranks, uint32_t* rank) {
  return guarded(
      [&] { required(rank, "rank") = static_cast<uint32_t>(required(ranks, "ranks").communicator.rank()); });
}

sluice_status sluice_ranks_size(const sluice_ranks* ranks, uint32_t* size) {
  return guarded(
      [&] { required(size, "size") = static_cast<uint32_t>(required(ranks, "ranks").communicator.size()); });
}

sluice_status sluice_ranks_failure(const sluice_ranks* ranks, char** text) {
  return guarded([&] {
    char*& out = required(text, "text");
    const std::string failure = required(ranks, "ranks").communicator.failure();
    out = failure.empty() ? nullptr : new_text(failure);
  });
}

sluice_status sluice_ranks_traffic(const sluice_ranks* ranks, sluice_traffic* traffic) {
  return guarded([&] {
    const Result given(&required(traffic, "traffic"), "traffic");
    const auto counted = required(ranks, "ranks").communicator.counters();
    given.give({0, counted.sent, counted.received, counted.sent_besides, counted.received_besides,
                counted.received_from_hosts});
  });
}

sluice_status sluice_ranks_exchange(sluice_ranks* ranks, const char* name, const void* own, size_t bytes,
                                    char** all, size_t* sizes) {
  return guarded([&] {
    sluice_ranks& of = required(ranks, "ranks");
    required(all, "all");
    required(sizes, "sizes");
    if (bytes > SLUICE_MOST_EXCHANGED)
      sluice::fail(sluice::ErrorCode::kInvalidArgument, "{} bytes are exchanged; at most {} can be", bytes,
                   SLUICE_MOST_EXCHANGED);
    const char* const data = bytes == 0 ? "" : &required(static_cast<const char*>(own), "own");
    const std::vector<std::string> given = exchange(of, &required(name, "name"), std::string(data, bytes));
    std::string together;
    for (const std::string& one : given) together += one;
    *all = new_text(together);
    for (std::size_t rank = 0; rank < given.size(); ++rank) sizes[rank] = given[rank].size();
  });
}

sluice_status sluice_ranks_broadcast(sluice_ranks* ranks, const char* name, void* data, uint64_t bytes) {
  return guarded([&] {
    sluice_ranks& of = required(ranks, "ranks");
    if (bytes == 0) return;
    auto& values = required(static_cast<std::byte*>(data), "data");
    sluice::TransferGroup group;
    of.communicator.broadcast(id_of(&required(name, "name")), name, {&values, bytes}, 0, group.add());
    group.wait();
  });
}

sluice_status sluice_ranks_barrier(sluice_ranks* ranks, const char* name) {
  return guarded([&] { exchange(required(ranks, "ranks"), &required(name, "name"), {}); });
}

sluice_status sluice_ranks_fail(sluice_ranks* ranks, const char* text) {
  return guarded([&] { required(ranks, "ranks").communicator.fail(&required(text, "text")); });
}
