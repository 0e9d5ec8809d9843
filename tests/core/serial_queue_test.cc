#include "core/serial_queue.h"
#include "testing.h"

namespace sluice::serial_queue_test {

TEST(SerialQueue, DoesAllJobsInTheirOrderAndTellsWhatEachThrew) {
  std::vector<std::string> seen;
  const auto note = [&](const std::string& name) {
    return [&seen, name](std::exception_ptr error) { seen.push_back(name + (error ? " failed" : "")); };
  };
  Done kept;
  {
    SerialQueue queue;
    queue.add([&](Done&) { queue.add([&](Done&) { seen.push_back("added by a job"); }); }, note("adds"));
    queue.add([](Done&) { throw std::runtime_error("it fails"); }, note("throws"));
    queue.add([&](Done& done) { kept = std::exchange(done, nullptr); }, note("goes on elsewhere"));
    queue.add([](Done&) { throw std::runtime_error("nobody is told"); });
  }
  seen.erase(std::ranges::find(seen, "added by a job"));  // it comes before or after those added meanwhile
  EXPECT_EQ(seen, (std::vector<std::string>{"adds", "throws failed"}));
  kept(nullptr);
  EXPECT_EQ(seen.back(), "goes on elsewhere");
}

}  // namespace sluice::serial_queue_test
