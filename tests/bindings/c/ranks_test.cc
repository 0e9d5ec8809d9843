#include <unistd.h>

#include "tests/bindings/c/network.h"

// Tests of ranks: threads of this process, over shared memory and over functions of the caller.
namespace sluice_c_test::ranks_test {

// kHosts: links of the caller, who says that every two ranks share a host.
enum class Over { kMemory, kLinks, kHosts };

class RanksTest : public ::testing::TestWithParam<Over> {
 protected:
  // Calls body for each rank on a thread of its own.
  void run(uint32_t ranks, const std::function<void(sluice_ranks* ranks, uint32_t rank)>& body,
           double patience = 60) {
    int memory = -1;
    if (GetParam() == Over::kMemory) {
      ASSERT_OK(sluice_ranks_memory(ranks, &memory));
    }
    network_ = std::make_unique<Network>(ranks);
    sluice_ranks_options options = SLUICE_INIT(sluice_ranks_options);
    options.patience = patience;
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        sluice_ranks* made = nullptr;
        if (GetParam() != Over::kMemory) {
          sluice_links links = network_->links(rank);
          if (GetParam() == Over::kHosts) links.host = rank < 2 ? "a" : "b";
          ASSERT_OK(sluice_ranks_create_links(&links, &options, &made));
        } else {
          ASSERT_OK(sluice_ranks_create_local(memory, rank, &options, &made));
        }
        const RanksHandle handle(made, sluice_ranks_destroy);
        body(made, rank);
      });
    for (std::thread& thread : threads) thread.join();
    if (memory >= 0) ::close(memory);
  }
  static EngineHandle make(sluice_ranks* ranks, const std::string& disk, uint32_t stage,
                           const Choice& choice = {}) {
    EngineHandle engine = make_engine(choice, disk, [&](sluice_engine_options& options) {
      options.threads = 1;
      options.ranks = ranks;
      options.stage = stage;
    });
    if (engine != nullptr) set_start_values(engine.get());
    return engine;
  }
  static void train_as(sluice_engine* engine, uint32_t rank, int steps) {
    for (int step = 0; step < steps; ++step) {
      ASSERT_OK(sluice_engine_begin_step(engine, nullptr));
      for (uint32_t unit = kUnits; unit-- > 0;)
        add_unit_gradients(engine, unit, SLUICE_F32, 0.01f * static_cast<float>(unit + 3 * rank));
      ASSERT_OK(apply(engine));
    }
  }

  std::unique_ptr<Network> network_;
  Folder folder_;
};
std::string name_of(const ::testing::TestParamInfo<Over>& test) {
  return test.param == Over::kMemory  ? "SharedMemory"
         : test.param == Over::kLinks ? "OfTheCaller"
                                      : "BetweenHosts";
}
INSTANTIATE_TEST_SUITE_P(Links, RanksTest, ::testing::Values(Over::kMemory, Over::kLinks, Over::kHosts),
                         name_of);

// These tests do not depend on the kind of links, and run over shared memory alone.
class LocalRanksTest : public RanksTest {};
INSTANTIATE_TEST_SUITE_P(Links, LocalRanksTest, ::testing::Values(Over::kMemory), name_of);

TEST_P(RanksTest, TellEachOther) {
  run(3, [&](sluice_ranks* ranks, uint32_t rank) {
    uint32_t number = 9;
    EXPECT_OK(sluice_ranks_rank(ranks, &number));
    EXPECT_EQ(number, rank);
    EXPECT_OK(sluice_ranks_size(ranks, &number));
    EXPECT_EQ(number, 3u);
    const std::string own(rank, static_cast<char>('a' + rank));  // rank 0 gives nothing
    char* all = nullptr;
    size_t sizes[3];
    ASSERT_OK(sluice_ranks_exchange(ranks, "letters", own.data(), own.size(), &all, sizes));
    EXPECT_STREQ(all, "bcc");
    EXPECT_EQ(sizes[0] + 10 * sizes[1] + 100 * sizes[2], 210u);
    sluice_text_destroy(all);
    std::vector<uint32_t> values(1 << 20, rank == 0 ? 7 : rank);
    ASSERT_OK(sluice_ranks_broadcast(ranks, "numbers", values.data(), values.size() * 4));
    EXPECT_EQ(values, std::vector<uint32_t>(1 << 20, 7));
    ASSERT_OK(sluice_ranks_barrier(ranks, "all have it"));
    sluice_traffic traffic = SLUICE_INIT(sluice_traffic);
    EXPECT_OK(sluice_ranks_traffic(ranks, &traffic));
    EXPECT_GE(rank == 0 ? traffic.sent : traffic.received, values.size() * 4);
    char* text = own.empty() ? nullptr : all;
    EXPECT_OK(sluice_ranks_failure(ranks, &text));
    EXPECT_EQ(text, nullptr);
    const std::string much(SLUICE_MOST_EXCHANGED + 1, 'x');
    expect_error(sluice_ranks_exchange(ranks, "much", much.data(), much.size(), &all, sizes),
                 SLUICE_INVALID_ARGUMENT, {"65537", "65536"});
    if (GetParam() != Over::kMemory) {
      EXPECT_EQ(network_->threads_of(rank), GetParam() == Over::kHosts ? 2u : 1u);
    }
    ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
  });
  for (uint32_t rank = 0; GetParam() != Over::kMemory && rank < 3; ++rank)
    EXPECT_TRUE(network_->has_left(rank));
}

// A checkpoint is that of one rank: any number of ranks loads it, and goes on with the same bits as each
// other.
TEST_P(LocalRanksTest, LoadWhatOthersSaved) {
  for (const uint32_t stage : {0u, 3u}) {
    const std::string out = folder_.path("out" + std::to_string(stage));
    Values saved;
    std::mutex mutex;
    run(2, [&](sluice_ranks* ranks, uint32_t rank) {
      const EngineHandle engine = make(ranks, folder_.path(), SLUICE_STAGE(stage));
      train_as(engine.get(), rank, 2);
      expect_error(sluice_engine_save(engine.get(), "", 0, nullptr), SLUICE_INVALID_ARGUMENT, {"'out'"});
      char* path = nullptr;
      ASSERT_OK(sluice_engine_save(engine.get(), rank == 0 ? out.c_str() : "elsewhere", 0, &path));
      EXPECT_EQ(taken(path), out + "/step-00000002");
      const Values own = values_of(engine.get());
      if (rank == 0) saved = own;
      ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
    });
    const EngineHandle alone = make_engine({}, folder_.path());
    ASSERT_OK(sluice_engine_load(alone.get(), out.c_str()));
    EXPECT_TRUE(values_of(alone.get()) == saved);
    train_as(alone.get(), 0, 1);
    const Values after = values_of(alone.get());
    run(3, [&](sluice_ranks* ranks, uint32_t) {
      const EngineHandle engine = make(ranks, folder_.path(), SLUICE_STAGE(3 - stage));
      ASSERT_OK(sluice_engine_load(engine.get(), out.c_str()));
      EXPECT_TRUE(values_of(engine.get()) == saved);
      uint64_t steps = 0;
      EXPECT_OK(sluice_engine_steps(engine.get(), &steps));
      EXPECT_EQ(steps, 2u);
      train_as(engine.get(), 0, 1);
      ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
    });
    run(2, [&](sluice_ranks* ranks, uint32_t) {  // the same gradients on two ranks are those of one
      const EngineHandle engine = make(ranks, folder_.path(), SLUICE_STAGE(3 - stage));
      ASSERT_OK(sluice_engine_load(engine.get(), out.c_str()));
      train_as(engine.get(), 0, 1);
      EXPECT_TRUE(values_of(engine.get()) == after);
      ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
    });
  }
}

TEST_P(LocalRanksTest, StateIsReadByRank0Alone) {
  Choice choice;
  choice.place = "disk";
  run(3, [&](sluice_ranks* ranks, uint32_t rank) {
    const EngineHandle engine = make(ranks, folder_.path(), SLUICE_STAGE(1), choice);
    State alone, together;
    for (int step = 0; step < 2; ++step) {
      train_as(engine.get(), rank, 1);
      alone.clear();
      for (uint32_t unit = 0; unit < kUnits && rank == 0; ++unit)
        ASSERT_OK(sluice_engine_get_state_alone(engine.get(), unit, collect_state, &alone));
    }
    ASSERT_OK(sluice_ranks_barrier(ranks, "rank 0 has the state"));
    for (uint32_t unit = 0; unit < kUnits; ++unit)
      ASSERT_OK(sluice_engine_get_state(engine.get(), unit, collect_state, &together));
    EXPECT_TRUE(alone == together);
    EXPECT_EQ(alone.empty(), rank > 0);
    ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
  });
}

TEST_P(LocalRanksTest, StateIsNotReadInPartAfterValuesWereSet) {
  run(2, [&](sluice_ranks* ranks, uint32_t rank) {
    const EngineHandle engine = make(ranks, folder_.path(), SLUICE_STAGE(1));
    train_as(engine.get(), rank, 1);
    if (rank == 1) {
      ASSERT_OK(sluice_engine_set_values(engine.get(), 1, start_values, nullptr));
    }
    ASSERT_OK(sluice_ranks_barrier(ranks, "rank 1 has set values"));
    State state;
    if (rank == 0) {
      expect_error(sluice_engine_get_state_alone(engine.get(), 1, collect_state, &state), SLUICE_STATE,
                   {"rank 1", "'unit.1' were set or edited there"});
      ASSERT_OK(sluice_engine_set_values(engine.get(), 1, start_values, nullptr));
    }
    state.clear();
    EXPECT_OK(sluice_engine_get_state_alone(engine.get(), 1, collect_state, &state));
    EXPECT_EQ(state.size(), rank == 0 ? 4u : 0u);
    train_as(engine.get(), rank, 1);
    ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
  });
}

TEST_P(LocalRanksTest, PlansAgreeAndModelsAreCompared) {
  run(2, [&](sluice_ranks* ranks, uint32_t rank) {
    Choice choice;
    choice.frozen = rank == 0 ? 0 : 2;
    const ModelHandle model = make_model(choice.frozen);
    sluice_engine_options options = options_of(choice, nullptr);
    options.ranks = ranks;
    sluice_engine* engine = nullptr;
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_INVALID_ARGUMENT,
                 {"unit 1", "trainable", "on rank 1"});
    options.update_in_backward = 1;
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_INVALID_ARGUMENT,
                 {"update_in_backward"});
    options.update_in_backward = 0;
    options.memory = rank == 1 ? options.reserved + 1 : options.memory;
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_BUDGET, {});
    options.memory = uint64_t{1} << 30;
    if (rank == 1) options.stop = [](void*) { return 1; };
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_STATE,
                 {rank == 1 ? "a function of the caller stopped it" : "rank 1 could not make its engine"});
    options.stop = nullptr;
    options.stage = 5;
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_INVALID_ARGUMENT, {"stage 4"});
    EXPECT_EQ(engine, nullptr);
    // The rank whose plan has the higher stage decides, and the plan of one rank asks no other.
    const EngineHandle made = make(ranks, folder_.path(), rank == 1 ? SLUICE_STAGE(3) : SLUICE_STAGE(0));
    char* json = nullptr;
    ASSERT_OK(sluice_engine_plan(made.get(), &json));
    EXPECT_NE(taken(json).find("\"stage\": 3"), std::string::npos);
    const ModelHandle same = make_model();
    options.stage = 0;
    if (rank == 1) {
      ASSERT_OK(sluice_plan(same.get(), &options, &json));
      EXPECT_NE(taken(json).find("\"stage\": 0"), std::string::npos);
    }
    // One engine at a time.
    expect_error(sluice_engine_create(same.get(), &options, &engine), SLUICE_STATE, {"options.ranks"});
    ASSERT_OK(sluice_engine_replan(made.get(), uint64_t{80} << 20));
    train_as(made.get(), rank, 1);
    ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
  });
}

TEST_P(RanksTest, OneThatFailsEndsAll) {
  std::atomic<int> ready{0};
  run(3, [&](sluice_ranks* ranks, uint32_t rank) {
    const EngineHandle engine = make(ranks, folder_.path(), SLUICE_STAGE(0));
    ASSERT_OK(sluice_engine_begin_step(engine.get(), nullptr));
    add_unit_gradients(engine.get(), 0, SLUICE_F32, 0.5f);
    ++ready;
    if (rank == 1) {
      while (ready < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_OK(sluice_ranks_fail(ranks, "the caller's own trouble"));
      return;
    }
    const auto ends = [](sluice_status status) {
      EXPECT_TRUE(status == SLUICE_IO || status == SLUICE_STATE) << status;
      expect_error(status, status, {"rank 1", "the caller's own trouble"});
    };
    ends(apply(engine.get()));
    ends(sluice_engine_acquire(engine.get(), 0, SLUICE_READ));
    ends(sluice_ranks_barrier(ranks, "more"));
    char* text = nullptr;
    EXPECT_OK(sluice_ranks_failure(ranks, &text));
    EXPECT_NE(taken(text).find("own trouble"), std::string::npos);
  });
}

TEST_P(RanksTest, OneThatDoesNotComeIsNamed) {
  std::atomic<bool> is_known{false};
  run(
      2,
      [&](sluice_ranks* ranks, uint32_t rank) {
        if (rank == 0)
          expect_error(sluice_ranks_barrier(ranks, "a meeting"), SLUICE_IO, {"rank 1", "a meeting"});
        if (rank == 0) is_known = true;
        while (!is_known) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      0.5);
}

TEST(RanksMisuse, IsRefused) {
  int memory = -1;
  expect_error(sluice_ranks_memory(1, &memory), SLUICE_INVALID_ARGUMENT, {"1 ranks", "2 to 64"});
  expect_error(sluice_ranks_memory(65, &memory), SLUICE_INVALID_ARGUMENT, {"65 ranks"});
  ASSERT_OK(sluice_ranks_memory(2, &memory));
  sluice_ranks* ranks = nullptr;
  expect_error(sluice_ranks_create_local(-1, 0, nullptr, &ranks), SLUICE_IO, {"descriptor -1"});
  expect_error(sluice_ranks_create_local(memory, 2, nullptr, &ranks), SLUICE_INVALID_ARGUMENT, {"rank 2"});
  sluice_ranks_options options = SLUICE_INIT(sluice_ranks_options);
  options.silence = -1;
  expect_error(sluice_ranks_create_local(memory, 0, &options, &ranks), SLUICE_INVALID_ARGUMENT, {"silence"});
  ASSERT_OK(sluice_ranks_create_local(memory, 0, nullptr, &ranks));
  sluice_ranks* second = nullptr;
  expect_error(sluice_ranks_create_local(memory, 0, nullptr, &second), SLUICE_STATE, {"rank 0"});
  sluice_ranks_destroy(ranks);
  ::close(memory);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  EXPECT_NE(sluice_ranks_create_local(ends[0], 0, nullptr, &second), SLUICE_OK);
  ::close(ends[0]), ::close(ends[1]);
  Network network(2);
  sluice_links links = network.links(0);
  links.packet_bytes = 95;
  expect_error(sluice_ranks_create_links(&links, nullptr, &second), SLUICE_INVALID_ARGUMENT, {"95", "96"});
  links = network.links(0);
  links.host = "a";
  links.packet_bytes = 2047;
  expect_error(sluice_ranks_create_links(&links, nullptr, &second), SLUICE_INVALID_ARGUMENT,
               {"2047", "2048"});
  links = network.links(0);
  links.gone = nullptr;
  expect_error(sluice_ranks_create_links(&links, nullptr, &second), SLUICE_INVALID_ARGUMENT, {"links.gone"});
  links = network.links(0);
  links.rank = 2;
  expect_error(sluice_ranks_create_links(&links, nullptr, &second), SLUICE_INVALID_ARGUMENT, {"rank 2 of 2"});
  EXPECT_EQ(second, nullptr);
  EXPECT_FALSE(network.has_left(0));
}

}  // namespace sluice_c_test::ranks_test
