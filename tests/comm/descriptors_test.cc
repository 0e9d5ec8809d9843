#include "comm/descriptors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm/worlds.h"
#include "forbidden.h"

// Descriptors that ranks of one host give each other.
namespace sluice::comm {
namespace descriptors_test {

constexpr std::uint64_t kId = 7;

Descriptor file_of(int rank) {
  Descriptor file(::memfd_create("a test's file", MFD_CLOEXEC));
  EXPECT_EQ(::write(file.get(), &rank, sizeof rank), static_cast<ssize_t>(sizeof rank));
  return file;
}

void expect_all(const Descriptors& all, int own, int ranks) {
  ASSERT_EQ(all.problem, "");
  ASSERT_EQ(all.of_ranks.size(), static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const int file = all.of_ranks[static_cast<std::size_t>(rank)].get();
    EXPECT_EQ(file >= 0, rank != own);
    int found = -1;
    if (rank != own) {
      EXPECT_EQ(::pread(file, &found, sizeof found, 0), static_cast<ssize_t>(sizeof found));
      EXPECT_EQ(found, rank);
      EXPECT_NE(::fcntl(file, F_GETFD) & FD_CLOEXEC, 0);
    }
  }
}

TEST(Descriptors, AreGivenToAllRanks) {
  for (const World world : {World::kThreads, World::kProcesses}) {
    if (world == World::kProcesses && !kForksAllowed) continue;
    for (const int ranks : {2, 3, 13})  // a socket may have room for ten
      run_communicators(world, ranks, [&](Communicator& communicator) {
        const Descriptor own = file_of(communicator.rank());
        for (int round = 0; round < 2; ++round)
          expect_all(exchange_descriptors(communicator, kId, "a test's files", &own, {}), communicator.rank(),
                     ranks);
        communicator.barrier(1, "the end of a test");
      });
  }
}

// Then no rank has any, and all know why.
TEST(Descriptors, ARankThatHasNoneTellsTheOthers) {
  run_communicators(World::kThreads, 3, [](Communicator& communicator) {
    const Descriptor own = file_of(communicator.rank());
    const bool has = communicator.rank() != 1;
    const Descriptors all = exchange_descriptors(communicator, kId, "a test's files", has ? &own : nullptr,
                                                 has ? "" : "it has no file");
    EXPECT_EQ(all.problem, "rank 1: it has no file");
    EXPECT_TRUE(all.of_ranks.empty());
    communicator.barrier(1, "the end of a test");
  });
}

TEST(Descriptors, ARankThatMaySendNoneTellsTheOthersAtOnce) {
  run_communicators(World::kThreads, 3, [](Communicator& communicator) {
    const Descriptor own = file_of(communicator.rank());
    if (communicator.rank() == 1) test::forbid_call(SYS_sendmsg);
    const auto begin = std::chrono::steady_clock::now();
    const Descriptors all = exchange_descriptors(communicator, kId, "a test's files", &own, {});
    EXPECT_EQ(all.problem, "rank 1: sendmsg: Operation not permitted (1)");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    communicator.barrier(1, "the end of a test");
  });
}

}  // namespace descriptors_test
}  // namespace sluice::comm
