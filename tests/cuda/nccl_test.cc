#include "comm/nccl.h"

#include <future>

#include "comm/worlds.h"
#include "cuda/gpu.h"
#include "thrown.h"
#include "variable.h"

// Messages between the GPUs of ranks. On a real GPU there is one rank, since NCCL refuses two on one.
namespace sluice::comm {
namespace nccl_test {

constexpr std::uint64_t kCall = 7;
constexpr std::size_t kPlace = std::size_t{2} << 20;

struct Joined {
  Communicator& communicator;
  Device& device;
  Nccl* nccl;  // null: `problem` says why not
  const std::string& problem;
};

class NcclTest : public GpuTest {
 protected:
  static void begin(int ranks, Schedule schedule, std::uint64_t seed = 0) {
    if (fake() == nullptr) return;
    fake()->begin({.schedule = schedule, .seed = seed, .devices = ranks, .nccl_memory = kPlace});
  }
  // own_problem: of each rank; empty: none has any.
  static void run(int ranks, const std::function<void(const Joined&)>& of,
                  const std::function<std::string(int rank)>& own_problem = {}) {
    run_communicators(World::kThreads, ranks, [&](Communicator& communicator) {
      const std::unique_ptr<Device> device = open_device(fake() != nullptr ? communicator.rank() : 0);
      std::string problem;
      const auto nccl = Nccl::join(communicator, kCall, *device,
                                   own_problem ? own_problem(communicator.rank()) : "", problem);
      of({communicator, *device, nccl.get(), problem});
    });
  }
};

// Messages that ranks send each other, and themselves, round after round in the same memory.
class Mailbox {
 public:
  Mailbox(const Joined& joined)
      : joined_(joined),
        rank_(joined.communicator.rank()),
        ranks_(joined.communicator.size()),
        host_(joined.device, static_cast<std::size_t>(2 * ranks_) * kPlace),
        memory_(joined.device, 2 * ranks_) {}
  void exchange(int round) {
    std::vector<Nccl::Message> sent, received;
    for (int other = 0; other < ranks_; ++other) {
      std::fill_n(host(other), kPlace, value(round, rank_, other));
      joined_.device.copy_in(stream_.get(), device(other), host(other), kPlace);
      sent.push_back({other, device(other), bytes(rank_, other)});
      received.push_back({other, device(ranks_ + other), bytes(other, rank_)});
    }
    joined_.nccl->exchange(stream_.get(), sent, received);
    for (int other = 0; other < ranks_; ++other)
      joined_.device.copy_out(stream_.get(), host(ranks_ + other), device(ranks_ + other),
                              bytes(other, rank_));
    joined_.device.synchronize(stream_.get());
    joined_.nccl->check();
    for (int other = 0; other < ranks_; ++other) {
      const std::vector<std::byte> all(host(ranks_ + other), host(ranks_ + other) + bytes(other, rank_));
      ASSERT_EQ(all, std::vector<std::byte>(all.size(), value(round, other, rank_)))
          << "round " << round << ", from rank " << other << " to rank " << rank_;
    }
  }
  // Another number of bytes between each two ranks; rank 0 sends rank 1 nothing.
  static std::size_t bytes(int from, int to) {
    return from == 0 && to == 1 ? 0 : kPlace / 2 + static_cast<std::size_t>(from * 1000 + to);
  }
  CUstream_st* stream() const { return stream_.get(); }
  DeviceAddress device(int place) const {
    return memory_.address() + static_cast<std::size_t>(place) * kPlace;
  }

 private:
  static std::byte value(int round, int from, int to) {
    return static_cast<std::byte>(1 + 50 * round + 7 * from + to);
  }
  std::byte* host(int place) { return host_.data() + static_cast<std::size_t>(place) * kPlace; }

  const Joined& joined_;
  const int rank_, ranks_;
  HostMemory host_;
  MappedMemory memory_;
  Device::Stream stream_ = joined_.device.make_stream(false);
};

TEST_F(NcclTest, EachRankReceivesWhatIsSentToIt) {
  for (const int ranks : fake() != nullptr ? std::vector{1, 2, 3} : std::vector{1})
    for (const Schedule schedule : {Schedule::kEarly, Schedule::kLate, Schedule::kRandom}) {
      begin(ranks, schedule, static_cast<std::uint64_t>(ranks));
      run(ranks, [](const Joined& joined) {
        if (fake() == nullptr && joined.problem.find("cannot be loaded") != std::string::npos)
          GTEST_SKIP() << joined.problem;
        ASSERT_EQ(joined.problem, "");
        Mailbox mailbox(joined);
        for (int round = 0; round < 3; ++round) mailbox.exchange(round);
      });
    }
}

TEST_F(NcclTest, WhatItTakesOfTheGpuIsTakenWhereRanksAreJoined) {
  SLUICE_NEEDS_THE_FAKE();
  begin(1, Schedule::kEarly);
  const std::unique_ptr<Device> device = open_device(0);
  const std::size_t before = device->free_memory();
  run(1, [&](const Joined& joined) { EXPECT_EQ(before - joined.device.free_memory(), kPlace); });
  EXPECT_EQ(device->free_memory(), before);
}

TEST_F(NcclTest, AllRanksHearWhyOneCannotJoin) {
  SLUICE_NEEDS_THE_FAKE();
  const auto expect_problem = [](const std::string& text, const std::function<std::string(int)>& own = {}) {
    run(
        3,
        [&](const Joined& joined) {
          EXPECT_EQ(joined.nccl, nullptr);
          EXPECT_THAT(joined.problem, testing::HasSubstr(text));
        },
        own);
  };
  begin(3, Schedule::kEarly);
  expect_problem("rank 1: it does not want to",
                 [](int rank) { return rank == 1 ? "it does not want to" : ""; });
  fake()->fail("ncclGetUniqueId", 0, 2);
  expect_problem("rank 0: ncclGetUniqueId fails");
  fake()->fail("ncclCommGetAsyncError", 1, 2);
  expect_problem("unhandled system error");
  fake()->begin({.devices = 3, .nccl = 21903});
  expect_problem("is NCCL 2.19.3, and 2.20.0 or later is needed");
  {
    const Variable named("SLUICE_NCCL", "/nowhere/libnccl.so.2");
    expect_problem("/nowhere/libnccl.so.2: cannot open shared object file");
  }
  const Variable named("SLUICE_NCCL", "libm.so.6");
  expect_problem("libm.so.6 has no function ncclGetVersion");
}

// One rank waits on its GPU for a message that never comes, since the other one fails.
TEST_F(NcclTest, AFailureOfTheRunEndsWhatGpusWaitFor) {
  SLUICE_NEEDS_THE_FAKE();
  begin(2, Schedule::kLate);
  std::promise<void> waits;
  run(2, [&](const Joined& joined) {
    Mailbox mailbox(joined);
    mailbox.exchange(0);
    if (joined.communicator.rank() == 1) {
      waits.get_future().wait();
      return joined.communicator.fail("the disk is full");
    }
    const Nccl::Message message{1, mailbox.device(0), 1000};
    joined.nccl->exchange(mailbox.stream(), {}, {&message, 1});
    waits.set_value();
    joined.device.synchronize(mailbox.stream());
    expect_error(ErrorCode::kIo, {"the disk is full"}, [&] { joined.nccl->check(); });
    expect_error(ErrorCode::kIo, {"the disk is full"}, [&] {
      joined.nccl->exchange(mailbox.stream(), {}, {&message, 1});
    });
  });
}

// The fake is as strict as the real one: nobody gets anything of it.
TEST_F(NcclTest, AMessageWhoseEndsDifferNeverComes) {
  SLUICE_NEEDS_THE_FAKE();
  begin(2, Schedule::kEarly);
  std::promise<void> waits;
  run(2, [&](const Joined& joined) {
    Mailbox mailbox(joined);
    const int rank = joined.communicator.rank();
    const Nccl::Message message{1 - rank, mailbox.device(0), rank == 0 ? 2000U : 1000U};
    if (rank == 1) {
      joined.nccl->exchange(mailbox.stream(), {&message, 1}, {});
      joined.device.synchronize(mailbox.stream());
      waits.get_future().wait();
      return joined.communicator.fail("it takes too long");
    }
    joined.nccl->exchange(mailbox.stream(), {}, {&message, 1});
    const Device::Event received = joined.device.make_event();
    joined.device.record(received.get(), mailbox.stream());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(joined.device.is_done(received.get()));
    waits.set_value();
    joined.device.synchronize(mailbox.stream());
    EXPECT_EQ(fake()->take_misuses(),
              std::vector<std::string>{"rank 1 sends 1000 bytes, and rank 0 receives 2000"});
  });
}

TEST_F(NcclTest, AnErrorOfNcclFailsTheRun) {
  SLUICE_NEEDS_THE_FAKE();
  begin(2, Schedule::kEarly);
  run(2, [](const Joined& joined) {
    Mailbox mailbox(joined);
    joined.communicator.barrier(1, "both are there");
    if (joined.communicator.rank() == 0) fake()->fail("ncclGroupEnd", 0, 6);
    joined.communicator.barrier(1, "both are there");
    // The rank that comes first has the error, and the other one hears of it.
    expect_error(ErrorCode::kIo, {"remote process exited"}, [&] {
      try {
        mailbox.exchange(0);
      } catch (const Error& own) {
        joined.communicator.fail(own.what());
        throw;
      }
    });
  });
}

}  // namespace nccl_test
}  // namespace sluice::comm
