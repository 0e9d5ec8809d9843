#include "engine/updates/update_pipeline.h"

#include "core/error.h"
#include "offload/test_files.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::engine::update_pipeline_test {

// While it `holds`, writes do not end before let_go().
class HoldingFile final : public offload::ForwardingFile {
 public:
  using ForwardingFile::ForwardingFile;
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done,
             offload::Urgency urgency) override {
    if (!holds) return ForwardingFile::write(offset, from, std::move(done), urgency);
    ForwardingFile::write(
        offset, from, [](const std::exception_ptr&) {}, urgency);
    held_.push_back(std::move(done));
  }

  void let_go(const std::exception_ptr& error) {
    for (const Done& done : std::exchange(held_, {})) done(error);
  }
  bool holds = false;

 private:
  std::vector<Done> held_;
};

class UpdatePipelineTest : public testing::Test {
 protected:
  static constexpr std::size_t kElements = 4096;

  explicit UpdatePipelineTest(const std::vector<std::string>& units = {"unit"},
                              const optim::OptimizerSettings& optimizer = {})
      : layout_(units_of(units)), optimizer_(optim::make_optimizer(optimizer)) {
    auto file = std::make_unique<HoldingFile>(*memory_);
    file_ = file.get();
    disk_.emplace(offload::alone(std::move(file)), ledger_);
    backings_ = make_backings(&*disk_);
    states_.emplace(layout_, StateFormat(layout_, *optimizer_, kElements),
                    std::vector<allocator::Tier>(units.size(), allocator::Tier::kDisk), *backings_);
    backings_->allocate();
    parameters_ = allocator::Region(ledger_, allocator::Purpose::kParameter, kElements * sizeof(float));
    gradient_ = allocator::Region(ledger_, allocator::Purpose::kGradient, kElements * sizeof(float));
    wholes_.start(ledger_);
    executor_ = make_inline_executor(layout_, *optimizer_, states_->format(), wholes_, {threads_});
    executor_->start(ledger_);
    pipeline_.emplace(layout_, *optimizer_, *states_, *executor_);
    pipeline_->set_slots(ledger_, 2);
    for (UnitId unit = 0; unit < units.size(); ++unit) write_zero_state(unit);
  }

  static Layout units_of(const std::vector<std::string>& names) {
    std::vector<UnitSpec> units;
    for (const std::string& name : names) {
      units.push_back({name, {}});
      units.back().parameters.push_back({name + ".weight", {kElements / 64, 64}, 0, 1});
    }
    return Layout(units);
  }

  void write_zero_state(UnitId unit) {
    TransferGroup batch;
    const std::size_t bytes = states_->format().chunk_bytes(unit, 0);
    states_->backing(unit).store(0, {pipeline_->slot(0), bytes}, batch.add());
    batch.wait();
  }

  void add(std::function<void()> on_applied, UnitId unit = 0) {
    Update update{.unit = unit,
                  .groups = {{0.01, 0.0, 1.0}},
                  .parameter_updates = {{1, 1.0}},
                  .parameters = {parameters_.data(), Dtype::kF32},
                  .gradient = {gradient_.data(), Dtype::kF32}};
    pipeline_->add(update, std::move(on_applied));
  }

  Layout layout_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  Threads threads_{1};
  allocator::Ledger ledger_;
  std::unique_ptr<offload::File> memory_ = offload::make_memory_file("disk");
  HoldingFile* file_ = nullptr;
  std::optional<offload::RecordStore> disk_;
  std::unique_ptr<Backings> backings_;
  std::optional<StateStore> states_;
  WholeStore wholes_{layout_, *optimizer_};
  allocator::Region parameters_, gradient_;
  std::unique_ptr<UpdateExecutor> executor_;
  std::optional<UpdatePipeline> pipeline_;
};

TEST_F(UpdatePipelineTest, AnUpdateEndsWithItsLastWrite) {
  bool applied = false;
  file_->holds = true;
  add([&] { applied = true; });
  EXPECT_TRUE(pipeline_->pump());
  EXPECT_TRUE(applied);
  EXPECT_FALSE(pipeline_->idle());
  EXPECT_TRUE(pipeline_->under_way(0));
  EXPECT_FALSE(pipeline_->pump());
  file_->let_go(nullptr);
  pipeline_->wait();
  EXPECT_TRUE(pipeline_->pump());
  EXPECT_TRUE(pipeline_->idle());
}

TEST_F(UpdatePipelineTest, AWriteThatFailsWhileThePumpRunsIsTold) {
  file_->holds = true;
  add([&] { file_->let_go(std::make_exception_ptr(Error(ErrorCode::kIo, "disk: it is broken"))); });
  EXPECT_EQ(thrown_by([&] { pipeline_->pump(); }).text, "'optimizer state of unit': disk: it is broken");
}

// An executor whose works last until a gate opens, and that notes the order in which they began.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  std::vector<UnitId> begun = {};
  void wait_until_begun(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return begun.size() >= count; });
  }
};
class GatedExecutor final : public UpdateExecutor {
 public:
  explicit GatedExecutor(Gate& gate) : gate_(gate) {}
  void start(allocator::Ledger& /*ledger*/) override {}
  void begin(const ChunkWork& work, Done done) override {
    {
      std::unique_lock lock(gate_.mutex);
      gate_.begun.push_back(work.update.unit);
      gate_.changed.notify_all();
      gate_.changed.wait(lock, [&] { return gate_.is_open; });
    }
    done(nullptr);
  }
  Threads& threads() override { return threads_; }
  double seconds() const override { return 0; }

 private:
  Gate& gate_;
  Threads threads_{1};
};

TEST(ThreadExecutorTest, WhatSomebodyWaitsForComesFirst) {
  for (const bool hurries : {false, true}) {
    Gate gate;
    std::vector<std::unique_ptr<UpdateExecutor>> two;
    for (int i = 0; i < 2; ++i) two.push_back(std::make_unique<GatedExecutor>(gate));
    const auto executor = make_thread_executor(std::move(two));
    std::vector<Update> updates(4);
    const Bucket bucket{};
    for (UnitId unit = 0; unit < updates.size(); ++unit) updates[unit].unit = unit;
    const auto begin = [&](UnitId unit) {
      executor->begin({updates[unit], bucket, 0, std::nullopt}, [](const auto&) {});
    };
    begin(0);
    begin(0);
    gate.wait_until_begun(2);
    for (const UnitId unit : {1U, 1U, 2U, 3U, 3U}) begin(unit);
    if (hurries) executor->hurry(3);
    {
      const std::lock_guard lock(gate.mutex);
      gate.is_open = true;
    }
    gate.changed.notify_all();
    gate.wait_until_begun(7);
    // Of two threads that take a work each either may note its own first, so the two next works are alike.
    EXPECT_EQ(gate.begun[2], hurries ? 3U : 1U);
  }
}

// An executor that notes which updates it is given works of.
class NotingExecutor final : public UpdateExecutor {
 public:
  NotingExecutor(UpdateExecutor& inner, std::string& notes) : inner_(inner), notes_(notes) {}
  void start(allocator::Ledger& ledger) override { inner_.start(ledger); }
  void begin(const ChunkWork& work, Done done) override {
    const std::string note = " work of " + std::to_string(work.update.unit);
    if (!notes_.ends_with(note)) notes_ += note;
    inner_.begin(work, std::move(done));
  }
  Threads& threads() override { return inner_.threads(); }
  double seconds() const override { return inner_.seconds(); }

 private:
  UpdateExecutor& inner_;
  std::string& notes_;
};

class UpdatesWithRoundsTest : public UpdatePipelineTest {
 protected:
  UpdatesWithRoundsTest()
      : UpdatePipelineTest({"first", "second"}, {.name = "adafactor", .settings = {{"beta1", 0.9}}}) {
    pipeline_.emplace(layout_, *optimizer_, *states_, noting_);
    pipeline_->set_slots(ledger_, 2);
  }

  std::string notes_;
  NotingExecutor noting_{*executor_, notes_};
};

// A rank would else wait in the sums of the later update, while another one, which has no memory for that
// yet, waits for this one to gather what the earlier update has changed.
TEST_F(UpdatesWithRoundsTest, AnUpdateIsReportedBeforeALaterOneIsGiven) {
  for (const UnitId unit : {0U, 1U}) add([&, unit] { notes_ += " end of " + std::to_string(unit); }, unit);
  while (!pipeline_->idle()) pipeline_->pump();
  EXPECT_EQ(notes_, " work of 0 end of 0 work of 1 end of 1");
}

}  // namespace sluice::engine::update_pipeline_test
