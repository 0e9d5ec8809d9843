#include "comm/worlds.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"
#include "engine/steps/scheduled_engine.h"
#include "engine/toy.h"
#include "offload/test_files.h"
#include "testing.h"
#include "thrown.h"

// Tests of several ranks that train a model with a tied embedding by a schedule. What they sum is the head's
// part of its gradient, and then what the lookup of tokens adds to it.
namespace sluice::engine::tied_ranks_test {

constexpr std::size_t kRows = 600, kWidth = 256, kTokens = 3, kOfRank = 2;
constexpr UnitId kTied = 0, kBlock = 1, kFinal = 2;
constexpr ParameterId kTable = 0;

struct Case {
  int ranks = 3;
  std::size_t stage = 0;
  const char* place = "memory";
  std::size_t group = kOfRank;
  bool by_tokens = true, reproducible = false, apart = true;
  double clip = 5;
};

Profile profile_of(std::size_t micro_batches, bool by_tokens) {
  Profile profile;
  profile.micro_batches = micro_batches;
  profile.tokens = kTokens;
  profile.units = {{"tied", {{"table", {kRows, kWidth}, 0, 2}, {"positions", {7, 100}, 0, 2}}},
                   {"block", {{"weight", {600, 300}, 0, 1}}},
                   {"final", {{"gamma", {1000}, 1, 1}}}};
  profile.units[kTied].parameters[0].by_tokens = by_tokens;
  profile.schedule = {{kTied, true, -1, false},      {kBlock, true, -1, false}, {kFinal, true, 0, true},
                      {kTied, true, 0, false, true}, {kBlock, true, 0, true},   {kTied, false, 1, true}};
  profile.unit_profiles.resize(profile.units.size());
  for (UnitProfile& unit : profile.unit_profiles) unit.choices = {{"none", 0, {}, 4096}};
  return profile;
}

// The tokens of a micro-batch, counted over all ranks. Where they are apart, each is in one micro-batch
// alone.
std::vector<std::int32_t> tokens_of(std::size_t micro_batch, bool apart) {
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < kTokens; ++i)
    tokens.push_back(
        static_cast<std::int32_t>((apart ? micro_batch * 53 + i * 11 : micro_batch % 2 + i) % kRows));
  return tokens;
}

// Returns an element of a micro-batch's gradient. The positions are written with the lookup alone. Some
// elements are -0, which is another number than 0 where nothing is added to it.
float gradient_of(ParameterId p, int use, std::size_t micro_batch, std::size_t i, int step) {
  const auto from = static_cast<std::uint32_t>(((i * 5 + p) * 2 + static_cast<std::size_t>(use)) * 64 +
                                               micro_batch * 7 + static_cast<std::size_t>(step));
  const std::uint32_t noise = from * 2654435761u >> 8;
  return noise % 8 == 0 ? -0.0f : static_cast<float>(noise) * 0x1p-24f - 0.5f;
}

class Rank {
 public:
  // communicator: null for one that trains alone.
  Rank(const Case& setup, std::size_t micro_batches, comm::Communicator* communicator)
      : setup_(setup),
        communicator_(communicator),
        profile_(profile_of(micro_batches, setup.by_tokens)),
        plan_(make_plan(profile_, *optimizer_, {kGiB, kGiB, 0}, request(), {})),
        disk_(offload::alone(offload::make_memory_file("disk")), ledger_),
        engine(profile_, plan_, *optimizer_, {threads_, ledger_, &disk_, nullptr, nullptr, communicator}) {
    for (UnitId unit = 0; unit < profile_.units.size(); ++unit) engine.load(unit, toy::start_values());
  }

  const Plan& plan() const { return plan_; }

  using Write = std::function<void(ParameterId p, int use, std::size_t micro_batch, GradientTarget target)>;
  // after_head is called in the last group, once the head's part of the table's gradient is there.
  double step(const Write& write, const std::function<void()>& after_head = {}) {
    engine.begin_step(toy::settings(0.01, 0.1, setup_.clip));
    for (std::size_t first = 0; first < profile_.micro_batches; first += plan_.group) {
      const std::size_t end = std::min(first + plan_.group, profile_.micro_batches);
      for (std::size_t i = 0; i < profile_.schedule.size(); ++i) {
        const Access& access = profile_.schedule[i];
        engine.acquire(access);
        for (std::size_t m = first; m < end; ++m) compute(access, m, write);
        const bool more = i + 1 < profile_.schedule.size() && profile_.schedule[i + 1].joined;
        if (!more) engine.release(access);
        if (access.joined) engine.release(profile_.schedule[i - 1]);
        if (access.joined && end == profile_.micro_batches && after_head) after_head();
      }
    }
    return engine.step().gradient_norm;
  }

  toy::Outcome save() {
    toy::Outcome outcome;
    const bool first = communicator_ == nullptr || communicator_->rank() == 0;
    for (UnitId unit = 0; unit < profile_.units.size(); ++unit)
      engine.save(unit, first ? toy::collect(outcome, optimizer_->state()) : UnitSink{});
    return outcome;
  }

 private:
  void compute(const Access& access, std::size_t m, const Write& write) {
    if (access.gradient_use < 0) return;
    const Layout& layout = engine.layout();
    for (ParameterId p = layout.first_parameter(access.unit); p < layout.end_parameter(access.unit); ++p) {
      if (access.unit == kTied && p != kTable && access.gradient_use == 0) continue;  // as a head
      const std::size_t number = m + offset();
      const bool rows = p == kTable && access.gradient_use == 1;
      write(p, access.gradient_use, number,
            rows ? engine.gradient_of_rows(p, 1, m, tokens_of(number, setup_.apart))
                 : engine.gradient(p, access.gradient_use, m));
    }
  }
  std::size_t offset() const {
    return communicator_ == nullptr
               ? 0
               : static_cast<std::size_t>(communicator_->rank()) * profile_.micro_batches;
  }
  PlanRequest request() const {
    PlanRequest request;
    if (communicator_ != nullptr) request.ranks = rank_of(*communicator_);
    request.stage = setup_.stage;
    request.clip = setup_.clip > 0;
    request.reproducible = setup_.reproducible;
    request.group = std::min(setup_.group, profile_.micro_batches);
    request.chunk_elements = kChunkGrain;
    request.places = toy::places(setup_.place);
    return request;
  }

  const Case setup_;
  comm::Communicator* const communicator_;
  const std::unique_ptr<optim::Optimizer> optimizer_ = optim::make_optimizer({});
  const Profile profile_;
  const Plan plan_;
  Threads threads_{1};
  allocator::Ledger ledger_;
  offload::RecordStore disk_;

 public:
  ScheduledEngine engine;
};

// Whether a row of the table gets no gradient by the lookup of a micro-batch's tokens.
bool is_zero(ParameterId p, int use, const std::vector<std::int32_t>& tokens, std::size_t i) {
  return p == kTable && use > 0 && std::ranges::count(tokens, static_cast<std::int32_t>(i / kWidth)) == 0;
}

std::size_t elements_of(ParameterId p) {
  return std::vector<std::size_t>{kRows * kWidth, 700, 180000, 1000}[p];
}

Rank::Write writing(const Case& setup, int step) {
  return [setup, step](ParameterId p, int use, std::size_t m, GradientTarget target) {
    const std::vector<std::int32_t> tokens = tokens_of(m, setup.apart);
    for (std::size_t i = 0, count = elements_of(p); i < count; ++i) {
      const float value = is_zero(p, use, tokens, i) ? 0.0f : gradient_of(p, use, m, i, step);
      target.data[i] = target.accumulate ? target.data[i] + value : value;
    }
  };
}

void run(const Case& setup, const std::function<void(Rank& rank, comm::Communicator& communicator)>& body) {
  comm::run_communicators(comm::World::kThreads, setup.ranks, [&](comm::Communicator& communicator) {
    try {
      Rank rank(setup, kOfRank, &communicator);
      body(rank, communicator);
      communicator.barrier(1, "the end of a test");
    } catch (const std::exception& error) {
      communicator.fail(error.what());
      throw;
    }
  });
}

toy::Outcome trained(const Case& setup) {
  toy::Outcome outcome;
  run(setup, [&](Rank& rank, comm::Communicator& communicator) {
    std::vector<double> norms;
    for (int step = 0; step < 2; ++step) norms.push_back(rank.step(writing(setup, step)));
    toy::Outcome saved = rank.save();
    saved.norms = norms;
    if (communicator.rank() == 0) outcome = std::move(saved);
  });
  return outcome;
}

// One engine alone, which is given each use's gradient as docs/ranks.md says it is: the micro-batches of each
// rank in their order, then the ranks pairwise: (rank 0 + rank 1) + rank 2. It adds the uses itself.
toy::Outcome as_written(const Case& setup) {
  Case alone = setup;
  alone.stage = 0;
  alone.place = "memory";
  Rank rank(alone, 1, nullptr);
  toy::Outcome outcome;
  std::vector<double> norms;
  for (int step = 0; step < 2; ++step)
    norms.push_back(rank.step([&](ParameterId p, int use, std::size_t, GradientTarget target) {
      std::vector<std::vector<std::int32_t>> tokens;
      for (std::size_t m = 0; m < static_cast<std::size_t>(setup.ranks) * kOfRank; ++m)
        tokens.push_back(tokens_of(m, setup.apart));
      for (std::size_t i = 0, count = elements_of(p); i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < setup.ranks; ++r) {
          float of_rank = 0;
          for (std::size_t k = 0; k < kOfRank; ++k) {
            const std::size_t m = static_cast<std::size_t>(r) * kOfRank + k;
            const float value = is_zero(p, use, tokens[m], i) ? 0.0f : gradient_of(p, use, m, i, step);
            of_rank = k == 0 ? value : of_rank + value;
          }
          sum = r == 0 ? of_rank : sum + of_rank;
        }
        target.data[i] = sum;
      }
    }));
  outcome = rank.save();
  outcome.norms = norms;
  return outcome;
}

TEST(TiedRanks, AddTheUsesOfTheSumsOverRanks) {
  for (const bool apart : {true, false}) {
    Case setup{.ranks = apart ? 3 : 2, .apart = apart};
    const toy::Outcome written = as_written(setup);
    ASSERT_EQ(written.norms.size(), 2u);
    EXPECT_NE(written.norms[0], written.norms[1]);
    for (std::size_t stage = 0; stage <= kMostStage; ++stage)
      for (const bool by_tokens : {true, false}) {
        setup.stage = stage;
        setup.group = (stage % 2 == 0) == apart ? 1 : kOfRank;
        setup.place = by_tokens == (setup.group == 1) ? "disk" : "memory";
        setup.by_tokens = by_tokens;
        EXPECT_TRUE(trained(setup) == written) << setup.ranks << " ranks, stage " << stage << ", "
                                               << setup.place << (by_tokens ? ", by rows" : ", whole");
      }
  }
}

TEST(TiedRanks, ThatAreReproducibleSendRowsWithTheBitsOfWholeSums) {
  Case setup{.ranks = 3, .by_tokens = false, .reproducible = true};
  const toy::Outcome whole = trained(setup);
  setup.by_tokens = true;
  for (const std::size_t stage : {std::size_t{0}, std::size_t{3}}) {
    setup.stage = stage;
    EXPECT_TRUE(trained(setup) == whole) << stage;
  }
}

// Where no token occurs twice, they receive the bytes that the plan says, and else fewer.
TEST(TiedRanks, ReceiveAtMostWhatThePlanSays) {
  for (const bool apart : {true, false}) {
    Case setup;
    setup.apart = apart;
    run(setup, [&](Rank& rank, comm::Communicator& communicator) {
      const std::uint64_t planned = rank.plan().step_bytes_received;
      for (int step = 0; step < 2; ++step) {
        const std::uint64_t before = communicator.counters().received;
        rank.step(writing(setup, step));
        const std::uint64_t received = communicator.counters().received - before;
        if (apart)
          EXPECT_EQ(received, planned);
        else
          EXPECT_LT(received, planned);
        // All-reduced are the table once, the rows of 18 tokens, and less than 200,000 other elements.
        EXPECT_LT(planned, (kRows * kWidth + 18 * kWidth + 200'000) * sizeof(float) * 4 / 3);
      }
    });
  }
}

TEST(TiedRanks, SumTheHeadsPartBesideTheBackwardPass) {
  Case setup;
  run(setup, [&](Rank& rank, comm::Communicator& communicator) {
    const std::uint64_t before = communicator.counters().received;
    bool came = false;
    rank.step(writing(setup, 0), [&] {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (!came && std::chrono::steady_clock::now() < until) {
        came = communicator.counters().received - before >= kRows * kWidth * sizeof(float);
        std::this_thread::yield();
      }
    });
    EXPECT_TRUE(came);
  });
}

TEST(TiedRanks, MustSayInWhichRowsAGradientIs) {
  Case setup;
  run(setup, [&](Rank& rank, comm::Communicator&) {
    expect_error(ErrorCode::kState, {"not said in which rows"}, [&] { rank.engine.gradient(kTable, 1, 0); });
  });
}

}  // namespace sluice::engine::tied_ranks_test
