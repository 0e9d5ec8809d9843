#include <dirent.h>
#include <fcntl.h>

#include "comm/worlds.h"
#include "core/dtype.h"
#include "testing.h"

// When something goes wrong, all ranks are told which rank it was, and what it did.
namespace sluice::comm::failures_test {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ContainsRegex;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Waits until the rank has heard of a failure.
std::string failure_of(const Communicator& comm) {
  const auto until = Clock::now() + kMostSeconds / 2;
  while (comm.failure().empty() && Clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
  return comm.failure();
}

// Ranks stay until all have seen the failure, as one that leaves is a failure, too.
class Meeting {
 public:
  explicit Meeting(int ranks) : missing_(ranks) {}
  void wait() {
    std::unique_lock lock(mutex_);
    if (--missing_ <= 0) all_.notify_all();
    all_.wait_for(lock, kMostSeconds / 2, [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int missing_;
};

// Memory that each rank has, longer than any call.
std::span<double> doubles_of(const Communicator& comm) {
  static std::vector<std::vector<double>> memory(8, std::vector<double>(30));
  return memory[static_cast<std::size_t>(comm.rank())];
}
Array array_of(const Communicator& comm, Dtype type = Dtype::kF32) { return {doubles_of(comm).data(), type}; }

using Call = std::function<void(Communicator&, Done)>;

// Calls something on each rank, and returns what each is told, within a second of the last one's call.
std::vector<std::string> errors_of(int ranks, std::optional<ErrorCode> code, const Call& call,
                                   const Deadlines& deadlines = kUnhurried) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  Meeting begun(ranks), seen(ranks);
  run_communicators(
      World::kThreads, ranks,
      [&](Communicator& comm) {
        begun.wait();
        const auto begin = Clock::now();
        Ending end;
        ErrorCode found{};
        call(comm, end.done());
        errors[static_cast<std::size_t>(comm.rank())] = end.error(&found);
        EXPECT_EQ(found, code.value_or(found)) << name_of(found);
        EXPECT_EQ(comm.failure(), errors[static_cast<std::size_t>(comm.rank())]);
        EXPECT_LT(seconds_since(begin), 10);
        seen.wait();
      },
      deadlines);
  return errors;
}

// Two of so many ranks begin what is not the same, and all are told of both.
void expect_mismatch(int ranks, const std::vector<std::string>& told, const Call& call) {
  for (const std::string& error : errors_of(ranks, ErrorCode::kState, call))
    for (const std::string& part : told) EXPECT_THAT(error, ContainsRegex(part));
}

TEST(Mismatch, IsNamedOnAllRanks) {
  const std::vector<std::size_t> borders{0, 4, 8, 12};
  for (const int ranks : {2, 4})
    expect_mismatch(ranks, {R"(the sum of 'h.3' \(f32, 9 elements\))", R"(\(f32, 10 elements\))", "rank 1"},
                    [](Communicator& comm, Done done) {
                      comm.all_reduce(1, "h.3", array_of(comm), comm.rank() == 1 ? 9 : 10, done);
                    });
  expect_mismatch(3, {R"(\(bf16, 0 elements)", R"(\(f16, 0 elements)", "rank 2"},
                  [](Communicator& comm, Done done) {
                    comm.all_gather(1, "x", array_of(comm, comm.rank() == 2 ? Dtype::kBf16 : Dtype::kF16),
                                    std::vector<std::size_t>{0, 0, 0, 0}, done);
                  });
  expect_mismatch(3, {"the gather of 'x'", "the scattered sum of 'x'", "rank 0"},
                  [&](Communicator& comm, Done done) {
                    const Array array = array_of(comm);
                    if (comm.rank() == 0) return comm.all_gather(1, "x", array, borders, done);
                    comm.reduce_scatter(1, "x", array, borders, done);
                  });
  expect_mismatch(2, {"rank 0", "rank 1", "borders"}, [](Communicator& comm, Done done) {
    const std::vector<std::size_t> own{0, comm.rank() == 0 ? std::size_t{6} : std::size_t{5}, 12};
    comm.reduce_scatter(1, "x", array_of(comm), own, done);
  });
  expect_mismatch(3, {"10 bytes from rank 1", "10 bytes from rank 0"}, [](Communicator& comm, Done done) {
    const auto bytes = std::as_writable_bytes(doubles_of(comm)).first(10);
    comm.broadcast(1, "x", bytes, comm.rank() == 1 ? 1 : 0, done);
  });
  expect_mismatch(2, {R"(the message 'loss' \(10 bytes\))", R"(the message 'loss' \(7 bytes\))"},
                  [](Communicator& comm, Done done) {
                    const auto bytes = std::as_writable_bytes(doubles_of(comm)).first(10);
                    if (comm.rank() == 0) return comm.send(1, 4, "loss", bytes, done);
                    comm.receive(0, 4, "loss", bytes.first(7), done);
                  });
  // In a call of a group, by numbers among all.
  expect_mismatch(4, {"from rank 1", "from rank 3"}, [](Communicator& comm, Done done) {
    const auto bytes = std::as_writable_bytes(doubles_of(comm));
    const int other = (comm.rank() + 2) % 4;  // what the other group waits for does not come
    if (comm.rank() % 2 == 0) return comm.receive(other, 4, "nothing", bytes, done);
    comm.group({1, 3})->broadcast(1, "x", bytes, comm.rank() == 3 ? 1 : 0, done);
  });
}

// Ranks that differ in this alone must not be described alike.
TEST(Mismatch, OfOrdersOfSumsIsNamedOnAllRanks) {
  const SumOrder in_turn{{0, 1, 2, 3}, {0, 1, 1, 1}};
  const char* const with_order = R"(4 elements(, borders [0-9a-f]+)?, added in the order [0-9a-f]+\))";
  for (const bool scattered : {false, true})
    expect_mismatch(4, {R"(\(f32, 4 elements(, borders [0-9a-f]+)?\))", with_order, "rank 3"},
                    [&](Communicator& comm, Done done) {
                      const Array array = array_of(comm);
                      const SumOrder order = comm.rank() == 3 ? in_turn : order_of_ranks(4);
                      if (scattered)
                        comm.reduce_scatter(1, "x", std::span(&array, 1),
                                            std::vector<std::size_t>{0, 1, 2, 3, 4}, order, done);
                      else
                        comm.all_reduce(1, "x", std::span(&array, 1), 4, order, done);
                    });
}

TEST(Failure, TextReachesAllRanks) {
  const auto errors = errors_of(4, ErrorCode::kIo, [](Communicator& comm, Done done) {
    if (comm.rank() != 2) return comm.all_reduce(1, "x", doubles_of(comm), done);
    comm.receive(3, 1, "never", {}, done);
    comm.fail("the disk is full");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "rank 2 has failed: the disk is full");
}

// A group's calls end where a rank fails that is not in it, which is named by its number among all.
TEST(Failure, OfARankOutsideEndsAGroupsCalls) {
  const auto errors = errors_of(4, ErrorCode::kNotFinite, [](Communicator& comm, Done done) {
    if (comm.rank() == 3) comm.fail("the loss is nan", ErrorCode::kNotFinite);
    const std::vector<int> members = comm.rank() % 2 == 0 ? std::vector{2, 0} : std::vector{3, 1};
    if (comm.rank() == 3) return comm.all_reduce(1, "x", array_of(comm), 10, done);
    // Rank 0 waits for a message that comes neither from rank 2 nor from rank 1.
    if (comm.rank() == 2)
      return comm.receive(3, 4, "nothing", std::as_writable_bytes(doubles_of(comm)), done);
    comm.group(members)->all_reduce(1, "x", array_of(comm), 10, done);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "rank 3 has failed: the loss is nan");
}

TEST(Failure, RefusesWhatComesLater) {
  run_communicators(World::kThreads, 2, [](Communicator& comm) {
    if (comm.rank() == 0) comm.fail("it was told to", ErrorCode::kBudget);
    std::vector<double> values(3);
    Ending first, second;
    ErrorCode code{};
    comm.all_reduce(1, "x", std::span(values), first.done());
    EXPECT_EQ(first.error(), "rank 0 has failed: it was told to");
    comm.read(1 - comm.rank(), 0, 0, 0, {}, second.done());
    EXPECT_EQ(second.error(&code), "rank 0 has failed: it was told to");
    EXPECT_EQ(code, ErrorCode::kBudget);
    EXPECT_THROW(comm.barrier(2, "later"), Error);
  });
}

// A failure is told also where a rank leaves as soon as it has failed, behind a full ring.
TEST(Failure, IsToldByARankThatLeavesAtOnce) {
  std::vector<std::vector<std::byte>> memory(3, std::vector<std::byte>(1 << 20));
  run_communicators(
      World::kThreads, 3,
      [&](Communicator& comm) {
        const std::span<std::byte> bytes = memory[static_cast<std::size_t>(comm.rank())];
        std::vector<Ending> ends(2);
        if (comm.rank() == 0) {
          comm.send(1, 1, "large", bytes, ends[0].done());
          comm.send(2, 1, "large", bytes, ends[1].done());
          comm.fail("enough");
          return;
        }
        comm.receive(0, 1, "large", bytes, ends[0].done());
        EXPECT_EQ(ends[0].error(), "rank 0 has failed: enough");
      },
      kUnhurried, LocalMemory::kLeastRing);
}

TEST(Patience, NamesWhoHasNotComeAndForWhat) {
  const Deadlines deadlines{kUnhurried.silence, milliseconds(300)};
  // Ranks 0 and 1 also wait for each other, once both have come.
  const auto errors = errors_of(
      3, ErrorCode::kIo,
      [](Communicator& comm, Done done) {
        if (comm.rank() != 2) return comm.all_reduce(1, "norm", doubles_of(comm), done);
        // Rank 2 learns of it by a message that it does not wait for itself.
        done(std::make_exception_ptr(Error(ErrorCode::kIo, failure_of(comm))));
      },
      deadlines);
  for (const std::string& error : errors)
    EXPECT_EQ(error, "rank 2 has not come to the sum of 'norm' (f64, 30 elements) for 0.3 s");
}

// It may have been stopped before it gave a sign of life.
TEST(Patience, NamesWhoHasNotBegunWhereAllWereStartedTogether) {
  const Deadlines together = Deadlines{milliseconds(100)}.of_ranks_started_together();
  EXPECT_EQ(together.start, std::chrono::seconds(20));
  EXPECT_EQ(Deadlines{std::chrono::minutes(1)}.of_ranks_started_together().start, std::chrono::minutes(1));
  LocalMemory memory(2, kTestRing);
  allocator::Ledger ledger;
  Communicator comm(make_local_links(memory, 0), {kUnhurried.silence, kUnhurried.patience, milliseconds(300)},
                    ledger);
  EXPECT_EQ(failure_of(comm), "rank 1 has given no sign of life since the start, for 0.3 s");
}

// Each would wait for the other until their patience ends.
TEST(Patience, IsNotForRanksThatWaitForEachOtherInDifferentExchanges) {
  Deadlines deadlines = kUnhurried;
  deadlines.apart = milliseconds(100);
  std::vector<std::string> errors(3);
  run_communicators(
      World::kThreads, 3,
      [&](Communicator& comm) {
        comm.exchange(1, "the step", "");
        try {
          // Rank 1 saves alone. The others call twice, so that the second call has the id of the first.
          comm.rank() == 1 ? comm.exchange(2, "the checkpoint", "") : comm.exchange(1, "the step", "");
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kState);
          errors[static_cast<std::size_t>(comm.rank())] = error.what();
        }
      },
      deadlines);
  for (const std::string& error : errors)
    for (const char* text : {"in the exchange of 'the step'", "in the exchange of 'the checkpoint'"})
      EXPECT_THAT(error, testing::HasSubstr(text));
}

TEST(Patience, IsNotSilent) {
  Deadlines deadlines = kUnhurried;
  deadlines.told = milliseconds(300);
  testing::internal::CaptureStderr();
  run_communicators(
      World::kThreads, 2,
      [&](Communicator& comm) {
        for (const char* name : {"a step", "another step"}) {  // of which it says the first, in this minute
          comm.exchange(1, name, "");
          if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(1000));
        }
        comm.exchange(1, "the end", "");
      },
      deadlines);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log,
              testing::HasSubstr("rank 1 has not come to the exchange of 'another step' (16 bytes) for 0."));
  EXPECT_THAT(log, testing::HasSubstr("this one waits for it, 60 s at most"));
  EXPECT_THAT(log, testing::Not(testing::HasSubstr("'the end'")));
}

TEST(Patience, NamesARankThatDoesNotAnswer) {
  const Deadlines deadlines{kUnhurried.silence, milliseconds(300)};
  Answer kept;
  run_communicators(
      World::kThreads, 2,
      [&](Communicator& comm) {
        std::vector<std::byte> bytes(10);
        if (comm.rank() == 0) {
          comm.serve([&](const Read&, Answer answer) { kept = std::move(answer); });
          failure_of(comm);
        } else {
          Ending end;
          comm.read(0, 1, 1, 0, bytes, end.done());
          EXPECT_EQ(end.error(), "rank 0 has not answered a read of 10 bytes for 0.3 s");
        }
      },
      deadlines);
  // An answer that comes when the rank is no more is refused.
  Ending sent;
  kept({}, nullptr, sent.done());
  EXPECT_THAT(sent.error(), HasSubstr("has ended"));
}

TEST(Patience, IsNotForARankThatIsWaitedForByNobody) {
  run_communicators(World::kThreads, 2,
                    [](Communicator& comm) {
                      std::this_thread::sleep_for(milliseconds(700));
                      comm.barrier(1, "after a while");
                      EXPECT_EQ(comm.failure(), "");
                    },
                    {milliseconds(300), milliseconds(300)});
}

// It lasts also where a rank waits for one that itself waits for the one at work.
TEST(Patience, LastsWhileTheRankThatIsWaitedForReportsWork) {
  run_communicators(World::kThreads, 3,
                    [](Communicator& comm) {
                      for (int i = 0; i < 50 && comm.rank() == 0; ++i) {
                        std::this_thread::sleep_for(milliseconds(20));
                        comm.report_work();
                      }
                      std::vector<std::byte> bytes(3);
                      Ending first, second;
                      if (comm.rank() == 0) comm.send(1, 7, "first", bytes, first.done());
                      if (comm.rank() == 1) comm.receive(0, 7, "first", bytes, first.done());
                      if (comm.rank() < 2) first.wait();
                      if (comm.rank() == 1) comm.send(2, 8, "second", bytes, second.done());
                      if (comm.rank() == 2) comm.receive(1, 8, "second", bytes, second.done());
                      if (comm.rank() > 0) second.wait();
                      EXPECT_EQ(comm.failure(), "");
                    },
                    {milliseconds(300), milliseconds(300)});
}

TEST(Leaving, WithMessagesUnderWayIsAFailure) {
  std::string error;
  run_communicators(World::kThreads, 2, [&](Communicator& comm) {
    if (comm.rank() == 1) return comm.barrier(1, "both are here");
    std::vector<double> values(3);
    Ending end;
    comm.barrier(1, "both are here");
    comm.all_reduce(2, "x", std::span(values), end.done());
    error = end.error();
  });
  EXPECT_EQ(error, "rank 1 has left, and has not come to the sum of 'x' (f64, 3 elements)");
}

TEST(Leaving, WithoutMessagesIsNone) {
  Meeting meeting(2);
  run_communicators(World::kThreads, 3, [&](Communicator& comm) {
    comm.barrier(1, "all are here");
    if (comm.rank() == 2) return;
    std::this_thread::sleep_for(milliseconds(100));
    std::vector<std::byte> bytes(3);
    Ending end;
    if (comm.rank() == 0) comm.send(1, 2, "still", bytes, end.done());
    if (comm.rank() == 1) comm.receive(0, 2, "still", bytes, end.done());
    end.wait();
    EXPECT_EQ(comm.failure(), "");
    meeting.wait();
  });
}

TEST(Leaving, LetsOthersReceiveWhatWasSent) {
  Meeting has_left(2);
  run_ranks(World::kThreads, 2, [&](LocalMemory& memory, int rank) {
    std::vector<std::byte> bytes(100'000, std::byte{7}), into(100'000);
    allocator::Ledger ledger;
    auto comm = std::make_unique<Communicator>(make_local_links(memory, rank), kUnhurried, ledger);
    Ending end;
    if (rank == 0) {
      comm->send(1, 1, "last", bytes, end.done());
      end.wait();
      comm.reset();
      return;
    }
    comm->receive(0, 1, "last", into, end.done());
    end.wait();
    EXPECT_EQ(into, bytes);
    EXPECT_EQ(comm->failure(), "");
  });
}

// Calls that are under way when a rank ends itself end with an error, and nothing is called twice.
TEST(Leaving, EndsWhatIsUnderWay) {
  LocalMemory memory(2, kTestRing);
  allocator::Ledger ledger;
  std::vector<float> values(1000);
  Ending sum, message, again;
  {
    Communicator comm(make_local_links(memory, 0), kUnhurried, ledger);
    comm.all_reduce(1, "x", {values.data(), Dtype::kF32}, values.size(),
                    [&, done = sum.done()](std::exception_ptr error) {
                      comm.receive(1, 3, "again", {}, again.done());
                      done(std::move(error));
                    });
    comm.send(1, 2, "y", std::as_bytes(std::span(values)), message.done());
  }
  for (Ending* end : {&sum, &message, &again})
    EXPECT_THAT(end->error(), HasSubstr("rank 0 has ended its part"));
  EXPECT_EQ(ledger.snapshot().total[static_cast<std::size_t>(allocator::Tier::kHost)].current, 0);
}

// Processes: one of them gets a signal while all others wait for it. The others report what they are told.
class Signals : public testing::Test {
 protected:
  void SetUp() override {
    if (!kForksAllowed) GTEST_SKIP() << "ThreadSanitizer follows no threads of forked processes";
  }
  // Returns how long it took until all others had ended.
  static double signal_one(int ranks, int signal, const Deadlines& deadlines, const std::string& expected) {
    LocalMemory memory(ranks, kTestRing);
    Children children;
    int ready[2];
    EXPECT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    for (int rank = 0; rank < ranks; ++rank)
      children.start(rank, [&] {
        allocator::Ledger ledger;
        Communicator comm(make_local_links(memory, rank), deadlines, ledger);
        comm.barrier(1, "all are here");
        EXPECT_EQ(::write(ready[1], "x", 1), 1);
        std::vector<float> values(100'000, 1);
        ErrorCode code{};
        if (rank == 1) std::this_thread::sleep_for(kMostSeconds / 2);
        Ending end;
        comm.all_reduce(2, "x", {values.data(), Dtype::kF32}, values.size(), end.done());
        EXPECT_THAT(end.error(&code), HasSubstr(expected));
        EXPECT_EQ(code, ErrorCode::kIo);
      });
    char letter;
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(::read(ready[0], &letter, 1), 1);
    const auto begin = Clock::now();
    ::kill(children.pid(1), signal);
    for (int rank = 0; rank < ranks; ++rank)
      if (rank != 1) {
        EXPECT_EQ(children.wait(static_cast<std::size_t>(rank)), 0);
      }
    const double taken = seconds_since(begin);
    ::close(ready[0]);
    ::close(ready[1]);
    return taken;
  }
};

TEST_F(Signals, AKilledRankIsNamedByAll) {
  EXPECT_LT(signal_one(4, SIGKILL, kUnhurried, "rank 1 is gone: its process has ended"), 10);
}

TEST_F(Signals, AStoppedRankIsNamedByAll) {
  EXPECT_LT(
      signal_one(3, SIGSTOP, {seconds(2), kUnhurried.patience}, "rank 1 has given no sign of life for 2 s"),
      20);
}

TEST_F(Signals, AProcessThatExitsWithoutADestructorIsNamed) {
  LocalMemory memory(2, kTestRing);
  Children children;
  children.start(0, [&] {
    allocator::Ledger ledger;
    new Communicator(make_local_links(memory, 0), kUnhurried, ledger);
    ::_exit(0);
  });
  children.start(1, [&] {
    allocator::Ledger ledger;
    Communicator comm(make_local_links(memory, 1), kUnhurried, ledger);
    Ending end;
    comm.receive(0, 1, "x", {}, end.done());
    EXPECT_EQ(end.error(), "rank 0 is gone: its process has ended");
  });
  children.expect_success();
}

// The process that starts others sees one end that never had links.
TEST(Gone, IsARankThatNeverBegan) {
  LocalMemory memory(2, kTestRing);
  allocator::Ledger ledger;
  Communicator comm(make_local_links(memory, 0), kUnhurried, ledger);
  std::vector<double> values(3);
  Ending end;
  comm.all_reduce(1, "x", std::span(values), end.done());
  EXPECT_FALSE(end.has_come(milliseconds(400)));  // nobody says that it is gone
  memory.leave(1, false);
  EXPECT_EQ(end.error(), "rank 1 is gone: its process has ended");
}

std::size_t entries(const char* folder) {
  std::size_t count = 0;
  DIR* const opened = ::opendir(folder);
  EXPECT_NE(opened, nullptr);
  while (::readdir(opened) != nullptr) ++count;
  ::closedir(opened);
  return count;
}

// Memory that this process shares with others. Names in /dev/shm would not do: other programs make some at
// any time.
std::size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:sluice") != std::string::npos;
  return count;
}

TEST(Remains, ThereAreNone) {
  const std::size_t files = entries("/proc/self/fd"), shared = shared_mappings();
  for (int i = 0; i < 3; ++i)
    run_communicators(World::kThreads, 3, [](Communicator& comm) { comm.barrier(1, "x"); });
  {
    LocalMemory memory(2, kTestRing);
    EXPECT_GT(shared_mappings(), shared);
    EXPECT_THROW(make_local_links(memory, 2), Error);
    auto links = make_local_links(memory, 0);
    EXPECT_THROW(make_local_links(memory, 0), Error);
    links.reset();
    EXPECT_THROW(make_local_links(memory, 0), Error);
  }
  EXPECT_EQ(entries("/proc/self/fd"), files);
  EXPECT_EQ(shared_mappings(), shared);
}

}  // namespace sluice::comm::failures_test
