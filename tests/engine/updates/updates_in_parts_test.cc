#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "core/bytes.h"
#include "engine/updates/update_pipeline.h"
#include "kernels/harness.h"
#include "kernels/matrix.h"
#include "offload/test_files.h"
#include "plain_sgemm.h"

// Updates in shards, and by other executors, give the bits of one process that updates whole units.
namespace sluice::engine {
namespace updates_in_parts_test {
using namespace sluice::test;

constexpr std::size_t kChunk = 64 * 1024;
constexpr int kSteps = 2;

Layout one_unit(Dtype type) {
  return Layout({{"unit",
                  {{"a", {60, 700}}, {"b", {5000}}, {"c", {24, 36}}, {"d", {4000, 40}}, {"e", {3, 80, 512}}},
                  true,
                  type}});
}

// Adds up sums among ranks that are threads.
class SumOfThreads final : public PartsOfOthers {
 public:
  explicit SumOfThreads(int ranks) : barrier_(ranks) {}
  void add(UnitId, const optim::PartSums& sums) override {
    {
      const std::lock_guard lock(mutex_);
      f64_.resize(sums.f64.size());
      f32_.resize(sums.f32.size());
      for (std::size_t i = 0; i < f64_.size(); ++i) f64_[i] += sums.f64[i];
      for (std::size_t i = 0; i < f32_.size(); ++i) f32_[i] += sums.f32[i];
    }
    barrier_.arrive_and_wait();
    std::ranges::copy(f64_, sums.f64.begin());
    std::ranges::copy(f32_, sums.f32.begin());
    barrier_.arrive_and_wait();
    {
      const std::lock_guard lock(mutex_);
      f64_.clear();
      f32_.clear();
    }
    barrier_.arrive_and_wait();
  }

 private:
  std::barrier<> barrier_;
  std::mutex mutex_;
  std::vector<double> f64_;
  std::vector<float> f32_;
};

// Computes another executor's works on a thread of its own, some time after they were given.
class LaterExecutor final : public UpdateExecutor {
 public:
  explicit LaterExecutor(std::unique_ptr<UpdateExecutor> inner)
      : inner_(std::move(inner)), thread_([this] { run(); }) {}
  ~LaterExecutor() override {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void start(allocator::Ledger& ledger) override { inner_->start(ledger); }
  void begin(const ChunkWork& work, Done done) override {
    {
      const std::lock_guard lock(mutex_);
      works_.push_back({work, std::move(done)});
    }
    changed_.notify_all();
  }
  Threads& threads() override { return inner_->threads(); }
  double seconds() const override { return inner_->seconds(); }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ends_ || !works_.empty(); });
      if (works_.empty()) return;
      auto [work, done] = std::move(works_.front());
      works_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      inner_->begin(work, std::move(done));
      lock.lock();
    }
  }

  std::unique_ptr<UpdateExecutor> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<ChunkWork, Done>> works_;
  bool ends_ = false;
  std::thread thread_;
};

struct Case {
  const char* optimizer;
  optim::Storage storage;
  Dtype type;
  allocator::Tier tier;
};

// The process with the shards of some ranks, and their state.
class Process {
 public:
  Process(const Layout& layout, const optim::Optimizer& optimizer, allocator::Tier tier, Shards::Ranks ranks,
          PartsOfOthers* others, bool later = false)
      : layout_(layout), format_(layout, optimizer, kChunk, ranks) {
    std::vector<std::unique_ptr<offload::File>> files;
    files.push_back(offload::make_memory_file("disk"));
    disk_.emplace(std::move(files), ledger_);
    backings_ = make_backings(&*disk_);
    states_.emplace(layout, format_, std::vector<allocator::Tier>{tier}, *backings_);
    if (tier == allocator::Tier::kDisk && format_.bytes(0) > 0) backings_->allocate();
    states_->start(ledger_);
    wholes_.emplace(layout, optimizer);
    wholes_->start(ledger_);
    executor_ = make_inline_executor(layout, optimizer, states_->format(), *wholes_,
                                     {threads_, products_.get(), nullptr, others});
    if (later) executor_ = std::make_unique<LaterExecutor>(std::move(executor_));
    executor_->start(ledger_);
    pipeline_.emplace(layout, optimizer, *states_, *executor_);
    pipeline_->set_slots(ledger_, 3);
  }

  // State begins as zeros, and masters as the parameters' values.
  void begin(ConstArray parameters) {
    for (std::size_t chunk = 0; chunk < format_.shards().chunks(0); ++chunk)
      transfer(chunk, true, [&](std::byte* state) {
        std::memset(state, 0, format_.chunk_bytes(0, chunk));
        const ElementRange range = format_.shards().chunk(0, chunk);
        if (!format_.has_master(0)) return;
        for (std::size_t i = 0; i < range.size(); ++i)
          reinterpret_cast<float*>(state)[i] = to_f32(parameters.bf16()[range.begin + i]);
      });
  }

  void update(std::uint64_t step, Array parameters, ConstArray gradient) {
    Update update;
    update.groups = {{0.01, 0.1, 0.5}};
    update.parameter_updates.assign(layout_.parameters(), {step, 1.0});
    update.parameters = parameters;
    update.gradient = gradient.at(format_.shards().here(0).begin);
    update.gradient_type = gradient.type;
    bool applied = false;
    pipeline_->add(update, [&] { applied = true; });
    while (!pipeline_->idle())
      if (!pipeline_->pump()) pipeline_->wait();
    EXPECT_TRUE(applied);
  }

  // Returns each array's bytes of each parameter, with their scales.
  using State = std::map<std::pair<std::size_t, ParameterId>, std::vector<std::byte>>;
  void collect(State& state) {
    for (std::size_t chunk = 0; chunk < format_.shards().chunks(0); ++chunk)
      transfer(chunk, false, [&](std::byte* data) {
        for (const Slice& slice : format_.shards().slices(0, chunk))
          for (std::size_t array = 0; array < format_.arrays(); ++array) {
            if (!format_.has(array, slice.parameter)) continue;
            const optim::StatePart part = format_.part(data, 0, chunk, array, slice.in_chunk);
            auto& bytes = state[{array, slice.parameter}];
            const auto add = [&](const void* from, std::size_t count) {
              const auto* begin = static_cast<const std::byte*>(from);
              bytes.insert(bytes.end(), begin, begin + count);
            };
            add(part.values.data, slice.count * size_of(part.values.type));
            if (part.scales !=
                nullptr)  // behind those of the same chunk: a cut may fall between two blocks of codes
              for (std::size_t block = 0; block < divide_up(slice.count, optim::kScaleBlock); ++block)
                scales_[{array, slice.parameter}].push_back(part.scales[block]);
          }
      });
    for (const auto& [key, scales] : scales_) {
      auto& bytes = state[{key.first + 100, key.second}];
      const auto* begin = reinterpret_cast<const std::byte*>(scales.data());
      bytes.insert(bytes.end(), begin, begin + scales.size() * sizeof(float));
    }
  }

 private:
  template <class Use>
  void transfer(std::size_t chunk, bool write, const Use& use) {
    if (states_->resident(0)) return use(states_->chunk_data(0, chunk));
    const std::span<std::byte> bytes = {pipeline_->slot(0), format_.chunk_bytes(0, chunk)};
    TransferGroup transfers;
    if (!write) {
      states_->backing(0).fetch(format_.chunk_offset(0, chunk), bytes, transfers.add());
      transfers.wait();
    }
    use(bytes.data());
    if (!write) return;
    states_->backing(0).store(format_.chunk_offset(0, chunk), bytes, transfers.add());
    transfers.wait();
  }

  const Layout& layout_;
  StateFormat format_;
  Threads threads_{1};
  std::unique_ptr<kernels::F32Products> products_ = kernels::make_blas_products(plain_sgemm);
  allocator::Ledger ledger_;
  std::optional<offload::RecordStore> disk_;
  std::unique_ptr<Backings> backings_;
  std::optional<StateStore> states_;
  std::optional<WholeStore> wholes_;
  std::unique_ptr<UpdateExecutor> executor_;
  std::optional<UpdatePipeline> pipeline_;
  std::map<std::pair<std::size_t, ParameterId>, std::vector<float>> scales_;
};

struct Outcome {
  std::vector<std::byte> parameters;
  Process::State state;
  bool operator==(const Outcome&) const = default;
};

enum class How { kWhole, kShardsOfOneProcess, kRanksAsThreads, kLater };

Outcome run(const Case& c, How how, int world) {
  const Layout layout = one_unit(c.type);
  const auto optimizer = optim::make_optimizer({.name = c.optimizer, .storage = c.storage});
  const std::size_t n = layout.unit_elements(0);
  TestArray parameters(c.type, random_values(n, 1, 0.1f));
  const bool apart = how == How::kRanksAsThreads;
  SumOfThreads sum(world);
  std::vector<std::unique_ptr<Process>> processes;
  for (int rank = 0; rank < (apart ? world : 1); ++rank) {
    const Shards::Ranks ranks = apart                             ? Shards::Ranks{world, rank, rank + 1}
                                : how == How::kShardsOfOneProcess ? Shards::Ranks{world, 0, world}
                                                                  : Shards::Ranks{};
    processes.push_back(std::make_unique<Process>(layout, *optimizer, c.tier, ranks, apart ? &sum : nullptr,
                                                  how == How::kLater));
    processes.back()->begin(parameters);
  }
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const TestArray gradient(c.type, random_values(n, static_cast<unsigned>(10 + step)));
    std::vector<std::jthread> threads;
    for (auto& process : processes)
      threads.emplace_back([&] { process->update(step, parameters, gradient); });
  }
  Outcome outcome;
  for (auto& process : processes) process->collect(outcome.state);
  const auto* begin = static_cast<const std::byte*>(ConstArray(parameters).data);
  outcome.parameters.assign(begin, begin + n * size_of(c.type));
  return outcome;
}

class UpdatesInParts : public testing::TestWithParam<Case> {};

TEST_P(UpdatesInParts, HaveTheBitsOfTheWhole) {
  const Case& c = GetParam();
  const Outcome whole = run(c, How::kWhole, 1);
  EXPECT_TRUE(run(c, How::kShardsOfOneProcess, 5) == whole) << "shards of one process";
  EXPECT_TRUE(run(c, How::kRanksAsThreads, 2) == whole) << "ranks as threads";
  EXPECT_TRUE(run(c, How::kLater, 1) == whole) << "on an executor's own thread";
  if (c.optimizer == std::string_view("muon")) return;  // every rank would multiply all matrices
  EXPECT_TRUE(run(c, How::kRanksAsThreads, 64) == whole) << "ranks of which some have nothing";
}

constexpr auto kHost = allocator::Tier::kHost;
constexpr auto kDisk = allocator::Tier::kDisk;
INSTANTIATE_TEST_SUITE_P(
    Cases, UpdatesInParts,
    testing::Values(Case{"adamw", {}, Dtype::kF32, kHost}, Case{"adamw", {}, Dtype::kBf16, kDisk},
                    Case{"adamw", {Dtype::kU8}, Dtype::kF32, kDisk},
                    Case{"adamw", {Dtype::kBf16, false, 7}, Dtype::kBf16, kHost},
                    Case{"adafactor", {}, Dtype::kF32, kHost}, Case{"adafactor", {}, Dtype::kBf16, kDisk},
                    Case{"muon", {Dtype::kU8}, Dtype::kF32, kDisk}, Case{"muon", {}, Dtype::kBf16, kHost}),
    [](const auto& test) {
      const Case& c = test.param;
      return fmt::format("{}_{}_{}_{}", c.optimizer, name_of(c.storage.state), name_of(c.type),
                         c.tier == kDisk ? "disk" : "memory");
    });

// Whoever pumps gets the error of a failed work, and the pipeline can be destroyed.
TEST(UpdateExecutor, ErrorsOfAWorkReachThePump) {
  class Failing final : public UpdateExecutor {
   public:
    void start(allocator::Ledger&) override {}
    void begin(const ChunkWork&, Done done) override {
      done(std::make_exception_ptr(Error(ErrorCode::kState, "the executor is out of order")));
    }
    Threads& threads() override { return threads_; }
    double seconds() const override { return 0; }

   private:
    Threads threads_{1};
  } executor;
  const Layout layout = one_unit(Dtype::kF32);
  const auto optimizer = optim::make_optimizer({});
  allocator::Ledger ledger;
  const auto backings = make_backings(nullptr);
  StateStore states(layout, StateFormat(layout, *optimizer, kChunk), {kHost}, *backings);
  states.start(ledger);
  UpdatePipeline pipeline(layout, *optimizer, states, executor);
  std::vector<float> values(layout.unit_elements(0));
  Update update;
  update.groups = {{0.01, 0.0, 1.0}};
  update.parameter_updates.assign(layout.parameters(), {1, 1.0});
  update.parameters = {values.data(), Dtype::kF32};
  update.gradient = {values.data(), Dtype::kF32};
  bool applied = false;
  pipeline.add(update, [&] { applied = true; });
  EXPECT_THROW(pipeline.pump(), Error);
  EXPECT_FALSE(applied) << "an update that failed is told as applied";
}

}  // namespace updates_in_parts_test
}  // namespace sluice::engine
