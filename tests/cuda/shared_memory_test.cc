#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "allocator/device_memory.h"
#include "comm/under_mpirun.h"
#include "core/bytes.h"
#include "cuda/kernel_test.h"
#include "kernels/device_sum.h"
#include "thrown.h"

// Memory of a GPU that other processes open.
namespace sluice::shared_memory_test {

// This process and another one that runs the same test, which the first of them starts: who forks has no
// driver in the child.
class BothProcesses {
 public:
  BothProcesses() {
    if (const char* const socket = std::getenv(kSocket); socket != nullptr) {
      socket_ = std::atoi(socket);
      return;
    }
    const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
    const std::string filter = fmt::format("--gtest_filter={}.{}", test->test_suite_name(), test->name());
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0)
      fail(ErrorCode::kIo, "a test gets no sockets");
    const timeval limit{60, 0};
    for (const int socket : sockets) ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const std::string program = comm::own_program();
    child_ = ::fork();
    if (child_ == 0) {
      ::close(sockets[0]);
      ::setenv(kSocket, std::to_string(sockets[1]).c_str(), 1);
      for (const char* name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_OUTPUT"}) ::unsetenv(name);
      ::dup2(STDERR_FILENO, STDOUT_FILENO);
      ::execl(program.c_str(), program.c_str(), filter.c_str(), "--gtest_brief=1", nullptr);
      ::_exit(127);
    }
    ::close(sockets[1]);
    socket_ = sockets[0];
  }
  ~BothProcesses() {
    ::close(socket_);
    int status = 0;
    if (child_ > 0 && ::waitpid(child_, &status, 0) == child_) {
      EXPECT_EQ(status, 0) << "the other process has failed; its own output says why";
    }
  }
  BothProcesses(const BothProcesses&) = delete;
  BothProcesses& operator=(const BothProcesses&) = delete;

  bool is_first() const { return child_ > 0; }
  void tell(const std::string& text) const {
    if (::send(socket_, text.data(), text.size(), MSG_NOSIGNAL) < 0)
      fail(ErrorCode::kIo, "the other process of a test has ended");
  }
  std::string hear() const {
    char text[256];
    const ssize_t bytes = ::recv(socket_, text, sizeof text, 0);
    if (bytes <= 0) fail(ErrorCode::kIo, "the other process of a test has ended, or says nothing");
    return {text, static_cast<std::size_t>(bytes)};
  }
  void give(const Descriptor& descriptor) const {
    Parts parts;
    cmsghdr* const control = CMSG_FIRSTHDR(&parts.header);
    const int number = descriptor.get();
    *control = {CMSG_LEN(sizeof number), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(control), &number, sizeof number);
    if (::sendmsg(socket_, &parts.header, MSG_NOSIGNAL) < 0)
      fail(ErrorCode::kIo, "the other process of a test has ended");
  }
  Descriptor get() const {
    Parts parts;
    if (::recvmsg(socket_, &parts.header, MSG_CMSG_CLOEXEC) <= 0)
      fail(ErrorCode::kIo, "the other process of a test gives nothing");
    int number = -1;
    std::memcpy(&number, CMSG_DATA(CMSG_FIRSTHDR(&parts.header)), sizeof number);
    return Descriptor(number);
  }

 private:
  struct Parts {
    char byte = 0;
    iovec bytes{&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr header{nullptr, 0, &bytes, 1, control.data(), control.size(), 0};
  };
  static constexpr const char* kSocket = "SLUICE_SOCKET_OF_TEST";
  pid_t child_ = 0;
  int socket_ = -1;
};

class SharedMemoryTest : public KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (!IsSkipped()) begin({});
  }
  void TearDown() override {
    stream_.reset();
    KernelTest::TearDown();
  }
  void begin(const fake_cuda::Settings& settings) {
    stream_.reset();
    device_.reset();
    if (fake() != nullptr) fake()->begin(settings);
    device_ = open_device(0);
    stream_ = device_->make_stream(false);
    piece_ = device_->info().extent_bytes;
  }
  allocator::DeviceRegion make_region(bool is_shared) {
    return {ledger_, *device_, allocator::Purpose::kStaging, piece_, is_shared};
  }
  // So many floats, of which each has a value of its own in each round.
  static constexpr std::size_t kCount = 5000;
  static float value_of(std::size_t i, int round) {
    return static_cast<float>(i * 8 + static_cast<std::size_t>(round));
  }
  void write(HostMemory& host, DeviceAddress to, int round) {
    auto* const values = reinterpret_cast<float*>(host.data());
    for (std::size_t i = 0; i < kCount; ++i) values[i] = value_of(i, round);
    device_->copy_in(stream_.get(), to, host.data(), kCount * sizeof(float));
    device_->synchronize(stream_.get());
  }
  void expect_values(HostMemory& host, DeviceAddress from, int round) {
    std::fill_n(host.data(), host.size(), std::byte{0x77});
    device_->copy_out(stream_.get(), host.data(), from, kCount * sizeof(float));
    device_->synchronize(stream_.get());
    const auto* const values = reinterpret_cast<const float*>(host.data());
    for (std::size_t i = 0; i < kCount; ++i) ASSERT_EQ(values[i], value_of(i, round)) << "element " << i;
  }
  void expect_refused(const std::string& misuse, const std::string& words,
                      const std::function<void()>& call) {
    expect_error(ErrorCode::kIo, {"GPU 0 (", fake() != nullptr ? words : ""}, call);
    if (fake() == nullptr) return;
    const auto misuses = fake()->take_misuses();
    ASSERT_EQ(misuses.size(), 1U) << misuse;
    EXPECT_NE(misuses[0].find(misuse), std::string::npos) << misuses[0];
  }

  allocator::Ledger ledger_;
  Device::Stream stream_{nullptr, {}};
  std::size_t piece_ = 0;
};

class SharedMemoryInEachOrder : public SharedMemoryTest,
                                public testing::WithParamInterface<std::tuple<int, bool>> {};

// One process writes, and the other copies, computes with it, and writes there, too.
TEST_P(SharedMemoryInEachOrder, IsReadAndWrittenByBothProcesses) {
  const BothProcesses both;
  const auto [order, shares] = GetParam();
  begin({.schedule = static_cast<Schedule>(order), .seed = 7, .shares_memory = shares});
  HostMemory host(*device_, kCount * sizeof(float));
  if (both.is_first()) {
    const allocator::DeviceRegion region = make_region(true);
    write(host, region.address(), 1);
    both.give(region.exported());
    EXPECT_EQ(both.hear(), "has read");
    write(host, region.address(), 2);
    both.tell("has written");
    EXPECT_EQ(both.hear(), "has added");
    write(host, region.address(), 3);
    both.tell("has written");
    EXPECT_EQ(both.hear(), "has written, too");
    expect_values(host, region.address(), 4);
    both.tell("has seen");
    EXPECT_EQ(both.hear(), "has closed");
    return;
  }
  allocator::OthersDeviceRegion opened(*device_, both.get(), piece_);
  const allocator::DeviceRegion own = make_region(false);
  const bool is_seen_by_cpu = fake() != nullptr && shares;
  if (is_seen_by_cpu) {
    EXPECT_EQ(reinterpret_cast<const float*>(opened.address())[kCount - 1], value_of(kCount - 1, 1));
  }
  expect_values(host, opened.address(), 1);
  both.tell("has read");
  EXPECT_EQ(both.hear(), "has written");
  kernels::DeviceSum sum(*device_);
  sum.add(stream_.get(), kCount, {reinterpret_cast<const float*>(opened.address()), Dtype::kF32}, false, 1,
          {reinterpret_cast<float*>(own.address()), Dtype::kF32},
          reinterpret_cast<double*>(own.address() + piece_ / 2));
  expect_values(host, own.address(), 2);
  both.tell("has added");
  // Work that is done late sees the bytes that are there then.
  if (fake() != nullptr && static_cast<Schedule>(order) == Schedule::kLate) {
    device_->copy(stream_.get(), own.address(), opened.address(), kCount * sizeof(float));
    EXPECT_EQ(both.hear(), "has written");
  } else {
    EXPECT_EQ(both.hear(), "has written");
    device_->copy(stream_.get(), own.address(), opened.address(), kCount * sizeof(float));
  }
  expect_values(host, own.address(), 3);
  write(host, own.address(), 4);
  device_->copy(stream_.get(), opened.address(), own.address(), kCount * sizeof(float));
  device_->synchronize(stream_.get());
  both.tell("has written, too");
  EXPECT_EQ(both.hear(), "has seen");
  opened = {};
  EXPECT_EQ(opened.address(), 0U);
  both.tell("has closed");
}
std::string name_of_order(const testing::TestParamInfo<std::tuple<int, bool>>& info) {
  const auto [order, shares] = info.param;
  return std::array{"Early", "Late", "Random"}[static_cast<std::size_t>(order)] +
         std::string(shares ? "WithTheCpu" : "");
}
INSTANTIATE_TEST_SUITE_P(Orders, SharedMemoryInEachOrder,
                         testing::Combine(testing::Range(0, 3), testing::Bool()), name_of_order);

TEST_F(SharedMemoryTest, IsInItsOwnersLedgerAlone) {
  const BothProcesses both;
  const auto held = [&] {
    return ledger_.snapshot().total[static_cast<std::size_t>(allocator::Tier::kDevice)].current;
  };
  const auto taken = [&] { return fake() == nullptr ? 0 : fake()->memory_taken(); };
  const std::size_t free = device_->free_memory();
  if (both.is_first()) {
    {
      const allocator::DeviceRegion region(ledger_, *device_, allocator::Purpose::kGradient, piece_ + 1,
                                           true);
      EXPECT_EQ(region.size(), 2 * piece_);
      EXPECT_EQ(held(), 2 * piece_);
      EXPECT_LE(device_->free_memory() + 2 * piece_, free);
      EXPECT_EQ(taken(), fake() == nullptr ? 0 : 2 * piece_);
      both.give(region.exported());
      both.hear();
    }
    EXPECT_EQ(held(), 0U);
    EXPECT_EQ(taken(), 0U);
    return;
  }
  const Descriptor exported = both.get();
  {
    allocator::OthersDeviceRegion first(*device_, exported, piece_ + 1),
        second(*device_, exported, piece_ + 1);
    EXPECT_NE(first.address(), second.address());
    first = std::move(second);
    EXPECT_EQ(second.address(), 0U);
    HostMemory host(*device_, 4);
    device_->copy_out(stream_.get(), host.data(), first.address() + 2 * piece_ - 4, 4);
    device_->synchronize(stream_.get());
    EXPECT_EQ(held(), 0U);
    EXPECT_EQ(taken(), 0U);
    if (fake() != nullptr) {
      EXPECT_EQ(device_->free_memory(), free);
    }
  }
  both.tell("has ended it");
}

TEST_F(SharedMemoryTest, StaysWhereItsOwnerEnds) {
  HostMemory host(*device_, kCount * sizeof(float));
  allocator::OthersDeviceRegion opened;
  {
    const BothProcesses both;
    if (!both.is_first()) {
      const allocator::DeviceRegion region = make_region(true);
      write(host, region.address(), 1);
      both.give(region.exported());
      both.hear();
      return;
    }
    opened = {*device_, both.get(), piece_};
    both.tell("has it");
  }
  expect_values(host, opened.address(), 1);
}

// Ranks that are threads use it so.
TEST_F(SharedMemoryTest, IsSeenTwiceInOneProcess) {
  HostMemory host(*device_, kCount * sizeof(float));
  const allocator::DeviceRegion region = make_region(true);
  const allocator::OthersDeviceRegion opened(*device_, region.exported(), piece_);
  EXPECT_NE(opened.address(), region.address());
  write(host, region.address(), 1);
  expect_values(host, opened.address(), 1);
  write(host, opened.address(), 2);
  expect_values(host, region.address(), 2);
}

TEST_F(SharedMemoryTest, WhatTheDeviceLacksIsABudgetError) {
  const std::size_t all = device_->info().memory / piece_ * piece_;
  expect_error(ErrorCode::kBudget, {"asked of GPU 0", "are free"},
               [&] { (void)device_->create_shared_extent(all + piece_); });
  expect_error(ErrorCode::kBudget, {}, [&] {
    allocator::DeviceRegion(ledger_, *device_, allocator::Purpose::kStaging, all + piece_, true);
  });
  EXPECT_EQ(ledger_.snapshot().total[static_cast<std::size_t>(allocator::Tier::kDevice)].current, 0U);
}

TEST_F(SharedMemoryTest, OnlyWhatIsSharedIsExportedAndImported) {
  expect_error(ErrorCode::kIo, {"no memory of a GPU"}, [] { (void)allocator::DeviceRegion().exported(); });
  expect_refused("is not shared", "INVALID_VALUE", [&] { (void)make_region(false).exported(); });
  const Descriptor file("/dev/null", O_RDWR | O_CLOEXEC);
  expect_refused("no extent's", "INVALID_VALUE",
                 [&] { const allocator::OthersDeviceRegion region(*device_, file, piece_); });
}

TEST_F(SharedMemoryTest, TheCpuCannotTouchIt) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const allocator::DeviceRegion region = make_region(true);
  EXPECT_DEATH(*reinterpret_cast<volatile char*>(region.address()) = 1, "");
}

TEST_F(SharedMemoryTest, GpusThatDoNotReachEachOtherAreAnErrorAndLeaveNothing) {
  SLUICE_NEEDS_THE_FAKE();
  begin({.has_peers = false});
  const allocator::DeviceRegion region = make_region(true);
  const auto before = fake()->alive();
  expect_error(ErrorCode::kIo, {"cuMemSetAccess", "PEER_ACCESS_UNSUPPORTED"},
               [&] { const allocator::OthersDeviceRegion opened(*device_, region.exported(), piece_); });
  EXPECT_EQ(fake()->alive(), before);
}

}  // namespace sluice::shared_memory_test
