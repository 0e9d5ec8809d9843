#include <arpa/inet.h>
#include <dlfcn.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <deque>
#include <iostream>

#include "comm/worlds.h"
#include "testing.h"
#include "thrown.h"
#include "variable.h"

// These tests are about MPI and its launchers alone.
namespace sluice::comm {
namespace mpi_test {

using Variables = std::map<std::string, std::string>;

// Sets variables of launchers, and unsets all others of them.
class Launched {
 public:
  explicit Launched(const Variables& variables) {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                             "PMIX_RANK", "PMIX_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}) {
      const auto given = variables.find(name);
      all_.emplace_back(name, given == variables.end() ? std::nullopt : std::optional(given->second));
    }
  }

 private:
  std::deque<Variable> all_;
};

TEST(MpiLauncher, IsFoundByItsVariables) {
  const auto expect = [](const Variables& variables, const char* name, int rank, int ranks) {
    const Launched launched(variables);
    const auto found = find_mpi_launcher();
    ASSERT_TRUE(found) << name;
    EXPECT_EQ(found->name, name);
    EXPECT_EQ(found->rank, rank);
    EXPECT_EQ(found->ranks, ranks);
  };
  expect({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}}, "mpirun", 3, 4);
  expect({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, "mpiexec", 0, 2);
  expect({{"PMIX_RANK", "1"}}, "mpiexec", 1, 0);
  expect({{"PMIX_RANK", "1"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "8"}}, "srun", 1, 8);
  expect({{"PMI_RANK", "1"}, {"PMI_SIZE", "8"}, {"SLURM_PROCID", "1"}}, "srun", 1, 8);
  // mpirun within an allocation of Slurm.
  expect({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}}, "mpirun", 0,
         2);
}

TEST(MpiLauncher, IsNoneWhereAProcessWasStartedAlone) {
  for (const auto& variables : std::vector<Variables>{
           {}, {{"SLURM_PROCID", "0"}}, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}}) {
    const Launched launched(variables);
    EXPECT_FALSE(find_mpi_launcher());
  }
}

TEST(MpiLauncher, IsRefusedWhereItOffersNoMpi) {
  {
    const Launched launched(Variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}});
    EXPECT_THAT(message_of([] { find_mpi_launcher(); }), HasSubstr("--mpi=pmix"));
  }
  for (const char* text : {"one", "-1", "1x", "99999999999"}) {
    const Launched launched(Variables{{"OMPI_COMM_WORLD_RANK", text}});
    EXPECT_THAT(message_of([] { find_mpi_launcher(); }),
                HasSubstr("OMPI_COMM_WORLD_RANK is '" + std::string(text)));
  }
}

TEST(MpiLinksBytes, AreBoundedForManyRanks) {
  EXPECT_EQ(mpi_links_bytes(1), 0u);
  for (const int ranks : {2, 3, 8, 64}) EXPECT_LE(mpi_links_bytes(ranks), std::size_t{12} << 20) << ranks;
  EXPECT_LE(mpi_links_bytes(1024), std::size_t{140} << 20);
}

class MpiTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!missing_for_mpi().empty()) GTEST_SKIP() << missing_for_mpi();
  }
};

// The ports on which this process listens, by the inodes of its sockets.
std::set<int> listening_ports() {
  std::set<std::string> sockets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string to = std::filesystem::read_symlink(entry.path(), error).string();
    if (to.starts_with("socket:[")) sockets.insert(to.substr(8, to.size() - 9));
  }
  std::set<int> ports;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::vector<std::string> columns{std::istream_iterator<std::string>(words), {}};
    if (columns.size() > 9 && columns[3] == "0A" && sockets.contains(columns[9]))
      ports.insert(std::stoi(columns[1].substr(columns[1].find(':') + 1), nullptr, 16));
  }
  return ports;
}

// A stranger who connects, and sends what cannot be.
void send_garbage(int port, std::mt19937_64& random) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    std::vector<std::uint64_t> garbage(random() % 200);
    for (std::uint64_t& word : garbage) word = random() % 3 == 0 ? random() % 8 : random();
    (void)::send(socket, garbage.data(), garbage.size() * 8, MSG_NOSIGNAL);
  }
  ::close(socket);
}

TEST_F(MpiTest, GarbageOnItsPortsChangesNothing) {
  if (!find_mpi_launcher()) return expect_success_under_mpirun(3, {"--mca", "btl", "tcp,self"});
  run_communicators(World::kMpi, 3, [](Communicator& comm) {
    const std::set<int> ports = listening_ports();
    EXPECT_FALSE(ports.empty());
    std::atomic<bool> ends{false};
    std::thread stranger([&] {
      std::mt19937_64 random(static_cast<std::uint64_t>(comm.rank()));
      while (!ends)
        for (const int port : ports) send_garbage(port, random);
    });
    for (std::uint64_t turn = 0; turn < 3; ++turn) {
      std::vector<float> values(100'000, static_cast<float>(comm.rank() + 1));
      Ending end;
      comm.all_reduce(turn, "x", {values.data(), Dtype::kF32}, values.size(), end.done());
      end.wait();
      EXPECT_EQ(values, std::vector<float>(100'000, 6));
    }
    ends = true;
    stranger.join();
  });
}

TEST_F(MpiTest, BeginsOnceInAProcess) {
  if (!find_mpi_launcher()) return expect_success_under_mpirun(1);
  { const auto first = load_mpi(); }
  expect_error(ErrorCode::kState, {"can begin only once"}, [] { load_mpi(); });
}

// Handlers that others have set for signals of defects must stay: the engine serves touches of absent units
// there.
TEST_F(MpiTest, LeavesSignalsAsTheyWere) {
  if (!find_mpi_launcher()) return expect_success_under_mpirun(2);
  std::vector<void (*)(int)> before;
  const auto handler_of = [](int number) {
    struct sigaction action = {};
    ::sigaction(number, nullptr, &action);
    return action.sa_handler;
  };
  for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGTERM, SIGINT, SIGCHLD, SIGPIPE})
    before.push_back(handler_of(number));
  run_communicators(World::kMpi, 2, [&](Communicator& comm) {
    std::vector<void (*)(int)> after;
    for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGTERM, SIGINT, SIGCHLD, SIGPIPE})
      after.push_back(handler_of(number));
    EXPECT_EQ(after, before);
    comm.barrier(1, "x");
  });
}

// Open MPI's sends fail as of then, and have no effect.
std::atomic<bool> sends_fail{false};

// A rank that has ended cannot be sent to. What it said before must still be read.
TEST_F(MpiTest, WhatARankSaidIsReadAfterASendToItHasFailed) {
  if (!find_mpi_launcher()) {
    MpirunProcess process(2, {own_program(), "--gtest_filter=MpiTest.WhatARankSaid*"}, {});
    process.wait();  // mpirun reports a rank that ends without MPI_Finalize, and ends the other one
    EXPECT_THAT(process.output(), HasSubstr("rank 0 has read: 0 1 2 3 4\n"));
    EXPECT_THAT(process.output(), HasSubstr("rank 1 is gone: nothing can be sent to it"));
    return;
  }
  const auto mpi = load_mpi();
  const auto links = mpi->make_links({});
  const Watchdog watchdog;
  const auto until = Links::Clock::now() + std::chrono::seconds(60);
  if (links->rank() == 1) {
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(links->send(0, std::as_bytes(std::span(&i, 1)), {}));
    while (Links::Clock::now() < until && !links->gone(0)) links->wait(until);  // mpirun ends it
    return;
  }
  std::vector<int> words;
  const auto take = [&](std::span<const std::byte> packet) {
    ASSERT_EQ(packet.size(), sizeof(int));
    words.push_back(0);
    std::memcpy(&words.back(), packet.data(), sizeof(int));
  };
  while (words.empty() && Links::Clock::now() < until)
    if (!links->receive(1, take)) links->wait(Links::Clock::now() + std::chrono::milliseconds(10));
  sends_fail = true;
  EXPECT_FALSE(links->send(1, {}, {}));
  while (!links->gone(1) && Links::Clock::now() < until)
    links->wait(Links::Clock::now() + std::chrono::milliseconds(10));
  while (links->receive(1, take)) {
  }
  std::cout << fmt::format("rank 0 has read: {}\nrank 1 is gone: {}\n", fmt::join(words, " "),
                           links->gone(1)->how)
            << std::flush;
}

// One rank may have more to do at its end than others, who wait for it as long as it lives.
TEST_F(MpiTest, ARankThatEndsLateIsWaitedFor) {
  if (!find_mpi_launcher()) return expect_success_under_mpirun(3);
  run_communicators(World::kMpi, 3, [](Communicator& comm) {
    comm.barrier(1, "x");
    if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::seconds(2));
  });
}

// A rank that waits leaves the core to those that compute.
TEST_F(MpiTest, WaitingTakesLittleOfACore) {
  if (!find_mpi_launcher()) return expect_success_under_mpirun(2);
  run_communicators(World::kMpi, 2, [](Communicator& comm) {
    comm.barrier(1, "x");
    const auto used = [] {
      timespec time{};
      ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
      return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    };
    const double before = used();
    std::this_thread::sleep_for(std::chrono::seconds(2));
    EXPECT_LT(used() - before, 0.5);  // spinning takes 2
    comm.barrier(2, "x");
  });
}

}  // namespace mpi_test
}  // namespace sluice::comm

// The plug-in finds this function before Open MPI's (tests/CMakeLists.txt exports it). Its types are Open
// MPI's as far as calls are concerned; the tests are built without its headers.
extern "C" int MPI_Issend(const void* bytes, int count, void* type, int to, int tag, void* comm,
                          void* request) {
  if (sluice::comm::mpi_test::sends_fail) return 16;  // MPI_ERR_OTHER
  using Send = int (*)(const void*, int, void*, int, int, void*, void*);
  static const Send send = [] {
    void* const library = ::dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Send>(library == nullptr ? nullptr : ::dlsym(library, "PMPI_Issend"));
  }();
  return send == nullptr ? 16 : send(bytes, count, type, to, tag, comm, request);
}
