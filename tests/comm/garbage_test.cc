#include <fcntl.h>
#include <sys/mman.h>

#include "comm/worlds.h"
#include "core/dtype.h"
#include "testing.h"

// Nothing that another process has written into shared memory ends this one, or is waited for for ever.
namespace sluice::comm::garbage_test {

using std::chrono::milliseconds;

TEST(Garbage, InSharedMemoryIsAnError) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 30; ++round) {
    const Watchdog watchdog;
    LocalMemory memory(2, LocalMemory::kLeastRing);
    allocator::Ledger ledger;
    const std::size_t size = LocalMemory::bytes(2, LocalMemory::kLeastRing);
    Communicator comm(make_local_links(memory, 0), {kUnhurried.silence, milliseconds(500)}, ledger);
    std::vector<double> values(300);
    Ending end;
    comm.all_reduce(1, "x", std::span(values), end.done());
    // All that follows the header, which is not read again: bells and rings.
    std::vector<std::uint64_t> garbage((size - 64) / 8);
    for (std::uint64_t& word : garbage)
      word = round % 3 == 0 ? random() : random() % (round % 3 == 1 ? 4 : 4096);
    ASSERT_GT(::pwrite(memory.descriptor(), garbage.data(), garbage.size() * 8, 64), 0);
    EXPECT_THAT(end.error(), AnyOf(HasSubstr("rank 1 sent what cannot be"), HasSubstr("rank 1 is gone"),
                                   HasSubstr("rank 1 has not come"), HasSubstr("rank 1 has left")));
  }
}

// These packets are well-formed, and mean nothing.
TEST(Garbage, InPacketsIsAnError) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    const Watchdog watchdog;
    LocalMemory memory(2, LocalMemory::kLeastRing);
    allocator::Ledger ledger;
    const auto garbler = make_local_links(memory, 1);
    Communicator comm(make_local_links(memory, 0), kUnhurried, ledger);
    std::vector<double> values(300);
    Ending end;
    comm.all_reduce(1, "x", std::span(values), end.done());
    std::vector<std::byte> packet(round % 5 == 0 ? random() % 48 : 48 + random() % 100);
    const std::vector<std::uint64_t> hello{0, 0x6f6c6c656863756c, 1, 0, 0, 0};
    if (round % 5 != 1) garbler->send(0, std::as_bytes(std::span(hello)), {});
    for (int i = 0; i < 8; ++i) {
      for (std::byte& byte : packet) byte = static_cast<std::byte>(random() % (round % 2 == 0 ? 256 : 12));
      if (!packet.empty()) packet[0] = static_cast<std::byte>(random() % 10);
      garbler->send(0, packet, {});
    }
    if (comm.failure().empty() && !end.has_come(milliseconds(20))) garbler->send(0, {}, {});
    EXPECT_FALSE(end.error().empty());
  }
}

TEST(Garbage, IsNotOpened) {
  const auto descriptor_of = [](const std::function<void(std::vector<std::uint64_t>&)>& change, bool sealed) {
    LocalMemory memory(2, LocalMemory::kLeastRing);
    std::vector<std::uint64_t> header(3);
    EXPECT_EQ(::pread(memory.descriptor(), header.data(), 24, 0), 24);
    const int made = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    change(header);
    EXPECT_EQ(::ftruncate(made, static_cast<off_t>(LocalMemory::bytes(2, LocalMemory::kLeastRing))), 0);
    EXPECT_EQ(::pwrite(made, header.data(), 24, 0), 24);
    if (sealed) {
      EXPECT_EQ(::fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    }
    return made;
  };
  const auto code_of = [](int descriptor) {
    try {
      const LocalMemory memory(descriptor);
      return -1;
    } catch (const Error& error) {
      return static_cast<int>(error.code());
    }
  };
  const int corrupt = static_cast<int>(ErrorCode::kCorrupt);
  EXPECT_EQ(code_of(descriptor_of([](auto&) {}, true)), -1);
  EXPECT_EQ(code_of(descriptor_of([](auto&) {}, false)), corrupt);
  EXPECT_EQ(code_of(descriptor_of([](auto& header) { ++header[0]; }, true)), corrupt);
  EXPECT_EQ(code_of(descriptor_of([](auto& header) { ++header[1]; }, true)), corrupt);              // version
  EXPECT_EQ(code_of(descriptor_of([](auto& header) { header[1] += 1ull << 32; }, true)), corrupt);  // ranks
  EXPECT_EQ(code_of(descriptor_of([](auto& header) { header[2] = ~0ull; }, true)), corrupt);
  EXPECT_EQ(code_of(descriptor_of([](auto& header) { header[2] *= 2; }, true)), corrupt);
  EXPECT_EQ(code_of(::open("/dev/null", O_RDONLY | O_CLOEXEC)), corrupt);
  EXPECT_EQ(code_of(1'000'000), static_cast<int>(ErrorCode::kIo));
}

}  // namespace sluice::comm::garbage_test
