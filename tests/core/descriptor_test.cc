#include "core/descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/text_file.h"
#include "testing.h"
#include "tests/core/support.h"

namespace sluice::descriptor_test {

class OpenFileTest : public testing::Test {
 protected:
  void expect_refused(const std::string& path, int flags, const std::string& why) const {
    const Thrown thrown = thrown_by([&] { open_file(path, flags); });
    EXPECT_EQ(thrown.code, ErrorCode::kInvalidArgument) << path;
    EXPECT_THAT(thrown.text, AllOf(HasSubstr(path), HasSubstr(why)));
  }
  TemporaryFolder folder_;
};

TEST_F(OpenFileTest, WhatIsNoFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(folder_.path("pipe").c_str(), 0600), 0);
  ASSERT_EQ(::symlink("pipe", folder_.path("link").c_str()), 0);
  for (const int flags : {O_RDONLY, O_RDWR, O_RDWR | O_CREAT}) {
    expect_refused(folder_.path("pipe"), flags, "a named pipe");
    expect_refused(folder_.path("link"), flags, "a named pipe");
    expect_refused("/dev/zero", flags, "a device");
    expect_refused(folder_.path(), flags, "a folder");
  }
  expect_refused(folder_.path("pipe"), O_WRONLY, "a pipe");
  EXPECT_EQ(thrown_by([&] { read_text_file(folder_.path("pipe")); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(thrown_by([&] { check_file("/dev/zero"); }).code, ErrorCode::kInvalidArgument);
}

TEST_F(OpenFileTest, LinksAreFollowedUnlessThatIsRefused) {
  folder_.put("victim", "kept");
  ASSERT_EQ(::symlink("victim", folder_.path("link").c_str()), 0);
  EXPECT_EQ(read_text_file(folder_.path("link")), "kept");
  expect_refused(folder_.path("link"), O_RDWR | O_CREAT | O_NOFOLLOW, "a link");
  ASSERT_EQ(::link(folder_.path("victim").c_str(), folder_.path("hard").c_str()), 0);
  EXPECT_EQ(read_text_file(folder_.path("hard")), "kept");
  expect_refused(folder_.path("hard"), O_RDWR | O_CREAT | O_NOFOLLOW, "another name");
}

TEST_F(OpenFileTest, ErrorsOfTheSystemNameThePath) {
  const Thrown thrown = thrown_by([&] { open_file(folder_.path("missing"), O_RDONLY); });
  EXPECT_EQ(thrown.code, ErrorCode::kNotFound);
  EXPECT_THAT(thrown.text, HasSubstr(folder_.path("missing")));
  EXPECT_GE(open_file(folder_.path("made"), O_RDWR | O_CREAT).get(), 0);
}

// Nobody must be able to plant a file where another one will be written until it has its name.
TEST_F(OpenFileTest, TemporaryFilesHaveNamesThatNobodyForesees) {
  const NewFile one = make_file(folder_.path("f.tmp-"), O_WRONLY, 0600);
  const NewFile other = make_file(folder_.path("f.tmp-"), O_WRONLY, 0600);
  EXPECT_NE(one.path, other.path);
  folder_.put("victim", "kept");
  for (pid_t pid = ::getpid(); pid < ::getpid() + 3; ++pid)
    ASSERT_EQ(::symlink("victim", folder_.path("t.json.tmp-" + std::to_string(pid)).c_str()), 0);
  write_text_file(folder_.path("t.json"), "new");
  EXPECT_EQ(contents(folder_.path("t.json")), "new");
  EXPECT_EQ(contents(folder_.path("victim")), "kept");
  EXPECT_FALSE(std::filesystem::is_symlink(folder_.path("t.json")));
}

TEST_F(OpenFileTest, RandomNames) {
  EXPECT_EQ(random_name().size(), 16u);
  EXPECT_NE(random_name(), random_name());
}

}  // namespace sluice::descriptor_test
