#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/updates/update_executor.h"

namespace sluice::engine {
namespace thread_executor_test {

// Computes nothing, and fails in the round 7.
class Turns final : public UpdateExecutor {
 public:
  explicit Turns(std::shared_future<void> go) : go_(std::move(go)) {}
  void start(allocator::Ledger& /*ledger*/) override {}
  void begin(const ChunkWork& work, Done done) override {
    go_.wait();
    done(work.round == 7 ? std::make_exception_ptr(std::runtime_error("the seventh")) : nullptr);
  }
  Threads& threads() override { return threads_; }
  double seconds() const override { return 1.5; }

 private:
  std::shared_future<void> go_;
  Threads threads_{1};
};

std::unique_ptr<UpdateExecutor> executor_of(std::size_t threads, const std::shared_future<void>& go) {
  std::vector<std::unique_ptr<UpdateExecutor>> turns;
  while (turns.size() < threads) turns.push_back(std::make_unique<Turns>(go));
  return make_thread_executor(std::move(turns));
}

TEST(ThreadExecutorTest, WorksGoOnInOrderWhileTheCallerDoes) {
  std::promise<void> go;
  const auto executor = executor_of(1, go.get_future().share());
  const Update update;
  const Bucket bucket;
  std::vector<int> ended;
  std::thread::id thread;
  std::promise<std::exception_ptr> last;
  for (int round = 0; round < 8; ++round)
    executor->begin({update, bucket, round, std::nullopt}, [&, round](std::exception_ptr error) {
      ended.push_back(round);
      thread = std::this_thread::get_id();
      if (round == 7) last.set_value(std::move(error));
    });
  go.set_value();  // until now none could end, and each begin() has returned
  EXPECT_THROW(std::rethrow_exception(last.get_future().get()), std::runtime_error);
  EXPECT_EQ(ended, (std::vector{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_EQ(executor->seconds(), 1.5);
}

TEST(ThreadExecutorTest, ItEndsWhenItsWorksHave) {
  std::promise<void> go;
  std::atomic<int> ended = 0;
  const Update update;
  const Bucket bucket;
  {
    const auto executor = executor_of(2, go.get_future().share());
    for (int i = 0; i < 3; ++i)
      executor->begin({update, bucket, i, std::nullopt}, [&](const std::exception_ptr&) { ++ended; });
    go.set_value();
  }
  EXPECT_EQ(ended, 3);
}

// The first work ends only when the second one has.
TEST(ThreadExecutorTest, AsManyWorksGoOnAtATimeAsThereAreThreads) {
  std::promise<void> go;
  go.set_value();
  const auto executor = executor_of(2, go.get_future().share());
  const Update update;
  const Bucket bucket;
  std::promise<void> second, first;
  executor->begin({update, bucket, 0, std::nullopt}, [&](const std::exception_ptr&) {
    second.get_future().wait();
    first.set_value();
  });
  executor->begin({update, bucket, 1, std::nullopt}, [&](const std::exception_ptr&) { second.set_value(); });
  first.get_future().wait();
  EXPECT_EQ(executor->seconds(), 1.5);
}

}  // namespace thread_executor_test
}  // namespace sluice::engine
