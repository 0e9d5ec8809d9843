// Tests of a device that does not answer. It is played by a transfer whose memory is absent (userfaultfd),
// for which the kernel waits until the test lets it go.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>

#include "offload/watch.h"
#include "testing.h"
#include "tests/offload/support.h"
#include "thrown.h"

namespace sluice::offload::hang_test {

using namespace testing;

// Pages that are absent until let_go(): a system call that needs them waits.
class AbsentMemory {
 public:
  explicit AbsentMemory(std::size_t bytes)
      : bytes_(bytes), descriptor_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC))) {
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    data_ = mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
    uffdio_api api = {UFFD_API, 0, 0};
    uffdio_register range = {
        {reinterpret_cast<std::uint64_t>(data_), bytes}, UFFDIO_REGISTER_MODE_MISSING, 0};
    usable_ = descriptor_ >= 0 && data_ != nullptr && ::ioctl(descriptor_, UFFDIO_API, &api) == 0 &&
              ::ioctl(descriptor_, UFFDIO_REGISTER, &range) == 0;
  }
  ~AbsentMemory() {
    let_go();
    if (data_ != nullptr) ::munmap(data_, bytes_);
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  AbsentMemory(const AbsentMemory&) = delete;
  AbsentMemory& operator=(const AbsentMemory&) = delete;

  bool usable() const { return usable_; }
  std::span<std::byte> all() { return {data_, bytes_}; }
  void let_go() {
    uffdio_range range = {reinterpret_cast<std::uint64_t>(data_), bytes_};
    if (usable_) ::ioctl(descriptor_, UFFDIO_UNREGISTER, &range);  // wakes the threads that wait
    usable_ = false;
  }

 private:
  std::size_t bytes_;
  int descriptor_;
  std::byte* data_ = nullptr;
  bool usable_ = false;
};

class HangTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!folder_.found()) GTEST_SKIP() << testing::kNoDirectFolder;
    if (!absent_.usable()) GTEST_SKIP() << "no userfaultfd here (it is forbidden in most containers)";
    std::string why;
    if (GetParam() && !uring_available(&why)) GTEST_SKIP() << why;
    IoOptions options;
    options.patience = std::chrono::seconds(2);
    service_ = GetParam() ? make_uring_service(options) : make_thread_service(options);
  }
  DirectFolder folder_;
  AbsentMemory absent_{kMiB};
  std::unique_ptr<IoService> service_;
};
INSTANTIATE_TEST_SUITE_P(Services, HangTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "io_uring" : "threads"; });

TEST_P(HangTest, IsAnErrorThatNamesTheTransferAndNobodyWaitsForIt) {
  const auto start = std::chrono::steady_clock::now();
  {
    const std::unique_ptr<File> file = service_->open(folder_.file("hangs"), OpenMode::kCreate);
    std::promise<std::exception_ptr> ended;
    file->write(kMiB, absent_.all(), [&](std::exception_ptr error) { ended.set_value(std::move(error)); });
    expect_error(ErrorCode::kIo,
                 {"hangs: write at offset 1048576: expected 1048576 bytes", "the device hangs"},
                 [&] { std::rethrow_exception(ended.get_future().get()); });
  }
  service_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  absent_.let_go();  // the system now ends the transfer, and nobody is told
}

// A write that makes a file longer holds the file's inode until its memory is there, and fallocate waits for
// the inode.
TEST_P(HangTest, AReservationThatHangsIsAnError) {
  const auto start = std::chrono::steady_clock::now();
  {
    const std::unique_ptr<File> file = service_->open(folder_.file("held"), OpenMode::kCreate);
    std::promise<void> ended;
    file->write(0, absent_.all(), [&](const std::exception_ptr& /*error*/) { ended.set_value(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // time for the system to begin the write
    expect_error(ErrorCode::kIo, {"held: reserving 4194304 bytes: no answer for 2 s"},
                 [&] { file->allocate(4 * kMiB); });
    ended.get_future().wait();
  }
  service_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  absent_.let_go();
}

TEST(CallWithPatience, ReturnsWhatTheCallDoes) {
  EXPECT_EQ(call_with_patience(std::chrono::seconds(60), "f", [] { return 7; }), 7);
}

// The call hangs as fdatasync does on a device that is gone, which a test cannot have.
TEST(CallWithPatience, LeavesACallThatHangsBehindWithWhatItOwns) {
  const auto held = std::make_shared<int>(0);
  std::promise<void> let_go;
  expect_error(ErrorCode::kIo, {"f: to be made durable: no answer for 0.08 s; the device hangs"}, [&] {
    call_with_patience(std::chrono::milliseconds(80), "f: to be made durable",
                       [held, go = let_go.get_future().share()] {
                         go.wait();
                         return 0;
                       });
  });
  EXPECT_EQ(held.use_count(), 2);  // one is here, and one in the call
  let_go.set_value();
  while (held.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_P(HangTest, SlowIsNotHanging) {
  const std::unique_ptr<File> file = service_->open(folder_.file("slow"), OpenMode::kCreate);
  Buffer data(kMiB);
  fill(data.all(), 1);
  for (int i = 0; i < 26; ++i) {  // lasts longer than the patience, with pauses between transfers
    write_now(*file, 0, data.all());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  read_now(*file, 0, data.all());
}

}  // namespace sluice::offload::hang_test
