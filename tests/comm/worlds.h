#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>

#include "comm/communicator.h"
#include "comm/faulty_links.h"
#include "comm/host_links.h"
#include "comm/local_links.h"
#include "comm/mpi_links.h"
#include "comm/under_mpirun.h"
#include "core/error.h"
#include "testing.h"
#include "watchdog.h"

// Runs ranks of tests, in every way in which ranks can be connected. No test waits for ever: a rank that does
// not end is reported, and ends the test program where it cannot be ended alone.
namespace sluice::comm {

inline constexpr Deadlines kUnhurried{std::chrono::seconds(30), std::chrono::seconds(60)};
inline constexpr std::size_t kTestRing = std::size_t{1} << 20;

// kHosts, kWideHosts: threads, of which every two, or three, are on another host. kMixedHosts: those of even
// and odd numbers are apart. kMpi, kMpiHost: processes under mpirun, which exchange packets through MPI, or
// find that they share a host.
enum class World {
  kThreads,
  kProcesses,
  kFaulty,
  kTinyPackets,
  kHosts,
  kWideHosts,
  kMixedHosts,
  kMpi,
  kMpiHost
};
inline void PrintTo(World world, std::ostream* to) {
  constexpr const char* kNames[] = {"threads",    "processes",   "faulty", "tiny packets",   "hosts",
                                    "wide hosts", "mixed hosts", "MPI",    "MPI on one host"};
  *to << kNames[static_cast<int>(world)];
}
inline bool has_hosts(World world) {
  return world == World::kHosts || world == World::kWideHosts || world == World::kMixedHosts;
}
inline int host_of(World world, int rank) {
  if (world == World::kMixedHosts) return rank % 2;
  return rank / (world == World::kHosts ? 2 : 3);
}
inline bool is_mpi(World world) { return world == World::kMpi || world == World::kMpiHost; }
// ThreadSanitizer follows no threads of a forked child.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kForksAllowed = false;
#else
inline constexpr bool kForksAllowed = true;
#endif

// Waits for one `done`, and tells its error.
class Ending {
 public:
  Done done() {
    return [promise = promise_](std::exception_ptr error) { promise->set_value(std::move(error)); };
  }
  bool has_come(std::chrono::milliseconds limit) {
    return future_.wait_for(limit) == std::future_status::ready;
  }
  // Throws the error.
  void wait() {
    if (!has_come(kMostSeconds / 2)) fail(ErrorCode::kInternal, "a call has not ended in time");
    if (const std::exception_ptr error = future_.get(); error != nullptr) std::rethrow_exception(error);
  }
  // Returns the text of the error; none is a failure.
  std::string error(ErrorCode* code = nullptr) {
    try {
      wait();
    } catch (const Error& error) {
      if (code != nullptr) *code = error.code();
      return error.what();
    }
    ADD_FAILURE() << "a call has ended without an error";
    return {};
  }

 private:
  std::shared_ptr<std::promise<std::exception_ptr>> promise_ =
      std::make_shared<std::promise<std::exception_ptr>>();
  std::future<std::exception_ptr> future_ = promise_->get_future();
};

// Calls a rank's part of a test; what it throws is a failure.
inline void call_rank(int rank, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << ": " << error.what();
  }
}

// Processes of this test, one for each rank.
class Children {
 public:
  ~Children() {
    for (const pid_t child : pids_)
      if (child > 0) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
  }
  void start(int rank, const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      {
        const Watchdog watchdog;
        call_rank(rank, body);
      }
      std::fflush(nullptr);
      ::_exit(testing::Test::HasFailure() ? 1 : 0);
    }
    pids_.push_back(child);
  }
  pid_t pid(std::size_t index) const { return pids_.at(index); }
  // Waits for a child, and returns its status.
  int wait(std::size_t index) {
    int status = 0;
    const auto until = std::chrono::steady_clock::now() + kMostSeconds + std::chrono::seconds(10);
    while (::waitpid(pids_.at(index), &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > until) {
        ADD_FAILURE() << "child " << index << " has not ended";
        return -1;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    pids_.at(index) = 0;
    return status;
  }
  void expect_success() {
    for (std::size_t i = 0; i < pids_.size(); ++i)
      if (pids_[i] > 0) {
        EXPECT_EQ(wait(i), 0) << "rank " << i << " has failed; its own output says why";
      }
  }

 private:
  std::vector<pid_t> pids_;
};

// The MPI of a process that a test has started by mpirun. Null: it is not one, or has not begun it.
inline Mpi*& mpi_of_this_process() {
  static Mpi* mpi = nullptr;
  return mpi;
}

inline HostLinks links_over_hosts(World world, LocalMemory& memory, int rank) {
  return make_host_links(make_local_links(memory, rank), kTestRing / 4, kMostSeconds,
                         std::to_string(host_of(world, rank)));
}

// `memory` is not used under mpirun.
inline std::unique_ptr<Links> links_of(World world, LocalMemory& memory, int rank) {
  if (has_hosts(world)) return links_over_hosts(world, memory, rank).links;
  if (world == World::kMpi) return mpi_of_this_process()->make_links({});
  if (world == World::kMpiHost)
    return make_host_links(mpi_of_this_process()->make_links({}), kTestRing, kMostSeconds).links;
  auto links = make_local_links(memory, rank);
  if (world == World::kFaulty)
    return make_faulty_links(
        std::move(links),
        {.seed = 1, .refused = 0.2, .held_back = 0.1, .most_microseconds = 500, .needless_return = 0.2});
  if (world == World::kTinyPackets) return make_faulty_links(std::move(links), {.packet_bytes = 160});
  return links;
}

using RankBody = std::function<void(LocalMemory& memory, int rank)>;

// Calls body for the rank that this process is under mpirun. A process that runs several tests has begun MPI.
inline void run_rank_of_mpirun(const RankBody& body) {
  const Watchdog watchdog;
  std::unique_ptr<Mpi> own;
  if (mpi_of_this_process() == nullptr) {
    own = load_mpi();
    mpi_of_this_process() = own.get();
  }
  LocalMemory none(1, LocalMemory::kLeastRing);
  const int rank = mpi_of_this_process()->rank();
  call_rank(rank, [&] { body(none, rank); });
}

// Calls body for all ranks at once: in threads, or in processes.
inline void run_ranks(World world, int ranks, const RankBody& body, std::size_t ring = kTestRing) {
  if (is_mpi(world)) {
    if (find_mpi_launcher()) return run_rank_of_mpirun(body);
    return expect_success_under_mpirun(ranks);
  }
  if (world == World::kProcesses) {
    LocalMemory memory(ranks, ring);
    Children children;
    for (int rank = 0; rank < ranks; ++rank) children.start(rank, [&] { body(memory, rank); });
    children.expect_success();
    return;
  }
  const Watchdog watchdog;
  LocalMemory memory(ranks, ring);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { call_rank(rank, [&] { body(memory, rank); }); });
  for (std::thread& thread : threads) thread.join();
}

// As run_ranks(), with a communicator for each rank.
inline void run_communicators(World world, int ranks, const std::function<void(Communicator& comm)>& body,
                              const Deadlines& deadlines = kUnhurried, std::size_t ring = kTestRing) {
  run_ranks(
      world, ranks,
      [&](LocalMemory& memory, int rank) {
        allocator::Ledger ledger;
        std::vector<int> hosts;
        for (int other = 0; has_hosts(world) && other < ranks; ++other)
          hosts.push_back(host_of(world, other));
        Communicator comm(links_of(world, memory, rank), deadlines, ledger, hosts);
        body(comm);
      },
      ring);
}

}  // namespace sluice::comm
