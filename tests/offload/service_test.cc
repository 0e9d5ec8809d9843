// Tests of what only files on a disk have: open modes, space, limits, and the choice of the service.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>

#include "forbidden.h"
#include "offload/disk_file.h"
#include "testing.h"
#include "tests/offload/support.h"
#include "thrown.h"

namespace sluice::offload::service_test {

using namespace testing;

std::size_t names_in(const std::string& folder) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
}

class ServiceTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!folder_.found()) GTEST_SKIP() << testing::kNoDirectFolder;
    std::string why;
    if (GetParam() && !uring_available(&why)) GTEST_SKIP() << why;
    service_ = GetParam() ? make_uring_service({}) : make_thread_service({});
  }
  ErrorCode code_of_open(const std::string& path, OpenMode mode) {
    return error_of([&] { service_->open(path, mode); }).code();
  }
  DirectFolder folder_;
  std::unique_ptr<IoService> service_;
};

TEST_P(ServiceTest, AFileThatWasCreatedIsFoundAgain) {
  const std::string path = folder_.file("new");
  Buffer data(kMiB), back(kMiB);
  fill(data.all(), 1);
  write_now(*service_->open(path, OpenMode::kCreate), 0, data.all());
  const std::unique_ptr<File> again = service_->open(path, OpenMode::kRead);
  EXPECT_EQ(again->name(), path);
  EXPECT_EQ(again->size(), kMiB);
  read_now(*again, 0, back.all());
  EXPECT_TRUE(equal(data.all(), back.all()));
  expect_error(ErrorCode::kIo, {}, [&] { write_now(*again, 0, data.all()); });  // it was opened for reading
  fill(data.all(), 2);
  write_now(*service_->open(path, OpenMode::kReadWrite), 0, data.all());
  read_now(*again, 0, back.all());
  EXPECT_TRUE(equal(data.all(), back.all()));
}

TEST_P(ServiceTest, OpeningAMissingOrExistingFile) {
  EXPECT_EQ(code_of_open(folder_.file("missing"), OpenMode::kRead), ErrorCode::kNotFound);
  EXPECT_EQ(code_of_open(folder_.file("missing"), OpenMode::kReadWrite), ErrorCode::kNotFound);
  EXPECT_EQ(code_of_open(folder_.file("missing"), OpenMode::kUnnamed), ErrorCode::kNotFound);
  EXPECT_EQ(code_of_open(folder_.file("missing/new"), OpenMode::kCreate), ErrorCode::kNotFound);
  std::ofstream(folder_.file("old")) << "precious";
  EXPECT_EQ(code_of_open(folder_.file("old"), OpenMode::kCreate), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of_open(folder_.file("old"), OpenMode::kUnnamed), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of_open(folder_.file("old/inside"), OpenMode::kRead), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of_open(folder_.path(), OpenMode::kRead), ErrorCode::kInvalidArgument);
  std::string text;
  std::ifstream(folder_.file("old")) >> text;
  EXPECT_EQ(text, "precious");
}

TEST_P(ServiceTest, AFifoDoesNotHang) {
  ASSERT_EQ(::mkfifo(folder_.file("fifo").c_str(), 0600), 0);
  EXPECT_EQ(code_of_open(folder_.file("fifo"), OpenMode::kRead), ErrorCode::kInvalidArgument);
}

TEST_P(ServiceTest, AFolderThatIsNotWritableIsNamed) {
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0500), 0);
  const auto open = [&] {
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0)
      std::_Exit(77);  // for root every folder is writable
    const Error error = error_of([&] { open_direct(folder_.path(), OpenMode::kUnnamed); });
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(error.code() == ErrorCode::kInvalidArgument ? 0 : 1);
  };
  EXPECT_EXIT(open(), ::testing::ExitedWithCode(0), "'" + folder_.path() + "' is not writable");
  ::chmod(folder_.path().c_str(), 0700);
}

TEST_P(ServiceTest, AFileSystemWithoutDirectIsRefusedWithWhatToDo) {
  expect_error(ErrorCode::kInvalidArgument, {"/proc", "O_DIRECT", "local disk"},
               [&] { service_->open("/proc/version", OpenMode::kRead); });
}

TEST_P(ServiceTest, AnUnnamedFileLeavesNothingInItsFolder) {
  const std::unique_ptr<File> file = service_->open(folder_.path(), OpenMode::kUnnamed);
  Buffer data(kDiskBlock);
  write_now(*file, 0, data.all());
  EXPECT_EQ(names_in(folder_.path()), 0u);
  EXPECT_THAT(file->name(), HasSubstr(folder_.path()));
}

TEST_P(ServiceTest, WithoutOTmpfileTheNameIsRemovedAtOnce) {
  // A name that a killed process has left behind must not be in the way.
  const OpenedFile first = open_and_unlink(folder_.path());
  const OpenedFile second = open_and_unlink(folder_.path());
  EXPECT_EQ(names_in(folder_.path()), 0u);
  struct stat a {
  }, b{};
  ASSERT_EQ(::fstat(first.descriptor.get(), &a), 0);
  ASSERT_EQ(::fstat(second.descriptor.get(), &b), 0);
  EXPECT_NE(a.st_ino, b.st_ino);
  EXPECT_EQ(a.st_nlink, 0u);
  EXPECT_EQ(a.st_mode & 0777u, 0600u);
}

TEST_P(ServiceTest, AllocateTakesRealSpace) {
  const std::string path = folder_.file("space");
  const std::unique_ptr<File> file = service_->open(path, OpenMode::kCreate);
  file->allocate(8 * kMiB);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, 8 * kMiB);
  file->allocate(kMiB);
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_LT(static_cast<std::uint64_t>(status.st_blocks) * 512, 2 * kMiB);
}

TEST_P(ServiceTest, AllocateBeyondTheDiskSaysWhatIsFree) {
  const std::unique_ptr<File> file = service_->open(folder_.path(), OpenMode::kUnnamed);
  file->allocate(kMiB);
  expect_error(ErrorCode::kBudget, {folder_.path(), "free", "too little"},
               [&] { file->allocate(free_disk_bytes(folder_.path()) + 100 * kGiB); });
  EXPECT_EQ(file->size(), kMiB);
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { file->allocate(UINT64_MAX); });
}

TEST_P(ServiceTest, AFileTruncatedUnderneathIsNoticed) {
  const std::string path = folder_.file("cut");
  const std::unique_ptr<File> file = service_->open(path, OpenMode::kCreate);
  Buffer data(4 * kMiB);
  write_now(*file, 0, data.all());
  ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(2 * kMiB + 1000)), 0);
  const Error error =
      error_of([&] { read_now(*file, 2 * kMiB, data.part(0, 512 * kKiB)); });  // reads one block
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  expect_error(ErrorCode::kIo, {}, [&] { read_now(*file, 0, data.all()); });
  EXPECT_THAT(error.what(), HasSubstr(path));
  EXPECT_THAT(error.what(), HasSubstr("found 1000"));
  EXPECT_THAT(error.what(), HasSubstr("offset " + std::to_string(2 * kMiB)));
  EXPECT_THAT(error.what(), HasSubstr("ends at " + std::to_string(2 * kMiB + 1000)));
}

TEST_P(ServiceTest, AFileSizeLimitIsReported) {
  const std::unique_ptr<File> file = service_->open(folder_.path(), OpenMode::kUnnamed);
  Buffer data(4 * kMiB);
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {2 * kMiB + 8 * kKiB, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Error error = error_of([&] { write_now(*file, 0, data.all()); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
  EXPECT_THAT(error.what(), HasSubstr(errno_text(EFBIG)));
  EXPECT_THAT(error.what(), HasSubstr("the file without a name in '" + folder_.path() + "'"));
  EXPECT_THAT(error.what(), HasSubstr("ulimit"));
}

TEST_P(ServiceTest, AnIdleServiceSleeps) {
  const std::unique_ptr<File> file = service_->open(folder_.path(), OpenMode::kUnnamed);
  Buffer data(kDiskBlock);
  write_now(*file, 0, data.all());
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 20);
}

TEST_P(ServiceTest, TwoFilesShareAService) {
  const std::unique_ptr<File> a = service_->open(folder_.path(), OpenMode::kUnnamed);
  std::unique_ptr<File> b = service_->open(folder_.path(), OpenMode::kUnnamed);
  Buffer data(8 * kMiB), back(4 * kMiB);
  fill(data.all(), 3);
  TransferGroup group;
  a->write(0, data.part(0, 4 * kMiB), group.add());
  b->write(0, data.part(4 * kMiB, 4 * kMiB), group.add());
  b.reset();  // waits for its own transfers
  group.wait();
  read_now(*a, 0, back.all());
  EXPECT_TRUE(equal(data.part(0, 4 * kMiB), back.all()));
}

INSTANTIATE_TEST_SUITE_P(All, ServiceTest, ::testing::Values(true, false),
                         [](const auto& test) { return test.param ? "uring" : "threads"; });

TEST(MakeServiceTest, OptionsThatCannotWorkAreRefused) {
  for (const IoOptions& options :
       {IoOptions{.queue_depth = 0}, IoOptions{.queue_depth = 100000}, IoOptions{.block_bytes = 0},
        IoOptions{.block_bytes = 1000}, IoOptions{.threads = 0}}) {
    expect_error(ErrorCode::kInvalidArgument, {}, [&] { make_thread_service(options); });
    expect_error(ErrorCode::kInvalidArgument, {}, [&] { make_io_service(options); });
  }
}

TEST(MakeServiceTest, UringWhereItIsAvailable) {
  std::string why;
  const bool available = uring_available(&why);
  EXPECT_EQ(make_io_service({})->name(), available ? "io_uring" : "threads");
  EXPECT_EQ(why.empty(), available);
}

TEST(MakeServiceDeathTest, ThreadsWithAWarningWhereUringIsForbidden) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto use = [] {
    test::forbid_call(SYS_io_uring_setup);  // as Docker's default profile does
    std::string why;
    const bool available = uring_available(&why);
    const bool refused = error_of([] { make_uring_service({}); }).code() == ErrorCode::kIo;
    const bool threads = make_io_service({})->name() == "threads";
    std::fprintf(stderr, "why: %s\n", why.c_str());
    std::_Exit(!available && refused && threads ? 0 : 1);
  };
  EXPECT_EXIT(use(), ::testing::ExitedWithCode(0),
              "(seccomp|io_uring_disabled).*16 threads instead(.|\n)*why: ");
}

}  // namespace sluice::offload::service_test
