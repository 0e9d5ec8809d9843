#pragma once
#include <gtest/gtest.h>
#include <sys/resource.h>

namespace sluice {

// The most files that this process may have open; no file can be made or opened where that is 0.
class FileLimit {
 public:
  FileLimit() { EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0); }
  ~FileLimit() { reset(); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;
  void reset() { set(before_.rlim_cur); }
  void set(rlim_t files) {
    rlimit changed = before_;
    changed.rlim_cur = files;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &changed), 0);
  }

 private:
  rlimit before_{};
};

}  // namespace sluice
