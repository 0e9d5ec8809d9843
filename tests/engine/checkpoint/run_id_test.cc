#include "engine/checkpoint/run_id.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/descriptor.h"
#include "core/error.h"

namespace sluice::engine {
namespace run_id_test {

class RunIdTest : public ::testing::Test {
 protected:
  RunIdTest() : out_(::testing::TempDir() + "run-id-" + std::to_string(::getpid())) {
    std::filesystem::create_directories(out_);
  }
  ~RunIdTest() override { std::filesystem::remove_all(out_); }
  std::string out_;
};

TEST_F(RunIdTest, IsReadAsItWasWritten) {
  EXPECT_EQ(read_run_id(out_), std::nullopt);
  const std::string id = random_name();
  write_run_id(out_, random_name());
  write_run_id(out_, id);
  EXPECT_EQ(read_run_id(out_), id);
}

TEST_F(RunIdTest, TakesAwayWhatAKilledRunLeft) {
  std::ofstream(out_ + "/.run.tmp-1") << "{";
  write_run_id(out_, random_name());
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(out_)) ++entries;
  EXPECT_EQ(entries, 1u);
}

TEST_F(RunIdTest, AFileOfSomethingElseIsRefused) {
  std::ofstream(out_ + "/.run") << R"({"version": 9, "run": "0"})";
  EXPECT_THROW(read_run_id(out_), Error);
}

}  // namespace run_id_test
}  // namespace sluice::engine
