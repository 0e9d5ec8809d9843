#include "comm/mesh.h"
#include "comm/worlds.h"
#include "core/bytes.h"
#include "core/random.h"
#include "engine/plan/cut.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"
#include "engine/steps/scheduled_engine.h"
#include "models/cases.h"
#include "models/model/message_neighbours.h"
#include "offload/records.h"
#include "offload/test_files.h"
#include "optim/optimizer.h"
#include "testing.h"

// A model that is cut into sections learns what it learns as a whole, with the same bits.
namespace sluice::models::testing::pipeline_test {

constexpr std::size_t kMicroBatches = 5;

ModelConfig with_layers(ModelConfig config, std::size_t layers) {
  config.layers = layers;
  return config;
}

// The chunks of each section.
std::vector<std::vector<engine::UnitRange>> sections_of(const std::vector<engine::UnitId>& cut,
                                                        std::size_t chunks, const ModelConfig& config) {
  std::vector<engine::UnitRange> ranges{{0, 0}};
  for (const engine::UnitId first : cut) {
    ranges.back().end = first;
    ranges.push_back({first, 0});
  }
  ranges.back().end = static_cast<engine::UnitId>(config.layers + 2);
  const auto sections = static_cast<int>(ranges.size() / chunks);
  std::vector<std::vector<engine::UnitRange>> all;
  for (int section = 0; section < sections; ++section)
    all.push_back(engine::units_of(ranges, sections, section));
  return all;
}

const auto kGPipe = engine::PipelineOrder::kGPipe;
const auto k1F1B = engine::PipelineOrder::k1F1B;
const auto kZbH1 = engine::PipelineOrder::kZeroBubbleH1;

// The values of all parameters, by name, after two steps on an engine, whose disk is a file in memory.
using Values = std::map<std::string, std::vector<float>>;
struct Way {
  const char* tier;
  engine::PipelineOrder order;
  std::vector<engine::UnitId> cut;
  std::size_t group;
  bool tied = true, clip = true;
  std::size_t chunks = 1;
  std::size_t zero = 0;  // ZeRO's stage
};

struct Numbers {
  std::vector<double> losses, norms;
};

struct Ranks {
  comm::Communicator *sections = nullptr, *data = nullptr;
  std::function<void()> between = {};  // is called where the engine lets updates go on
};

Values train_on_engine(const Model& model, const Data& data, const Way& way, const Place& place,
                       Numbers& numbers, const Ranks& ranks = {}) {
  const auto optimizer = optim::make_optimizer({.storage = {.master = false}});
  const auto library = kernels::load_matrix_library(1);
  Threads threads(1);
  engine::Profile profile =
      model.profile(kMicroBatches, *library, 0, engine::splits_backward(place.pipeline.order));
  if (place.pipeline.sections > 1)
    profile = engine::in_pipeline(profile, place.pipeline, place.section, way.group);
  engine::PlanRequest request;
  request.places.fill(engine::tier_of_place(way.tier));
  request.group = way.group;
  request.clip = way.clip;
  if (ranks.data != nullptr) {
    request.ranks = engine::rank_of(*ranks.data);
    request.stage = way.zero;
  }
  const engine::Plan plan = engine::make_plan(profile, *optimizer, {kGiB, kGiB, 0}, request, {});
  allocator::Ledger ledger;
  offload::RecordStore records(offload::alone(offload::make_memory_file("swap")), ledger);
  engine::Resources resources{threads, ledger, plan.uses_disk() ? &records : nullptr};
  resources.sections = ranks.sections;
  resources.communicator = ranks.data;

  engine::ScheduledEngine engine(profile, plan, *optimizer, resources);
  Runner runner(model, plan, engine, threads, *library, ledger, nullptr, place);
  const engine::Layout& layout = engine.layout();
  engine::UnitSource source;
  source.values = [&](engine::ParameterId parameter, std::size_t first, std::span<float> out) {
    const auto index = static_cast<std::uint32_t>(layout.logical_index(parameter));
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] =
          to_unit_interval(philox({static_cast<std::uint32_t>(first + i), index, 0, 0}, {1, 2})[0]) - 0.4f;
  };
  for (engine::UnitId unit = 0; unit < model.units().size(); ++unit) engine.load(unit, source);
  for (const std::uint64_t step : {1, 2}) {
    engine.begin_step({{{0.01, 0.1}, {0.01, 0.0}, {0.01, 0.1}}, way.clip ? 0.5 : 0.0});
    const std::uint64_t targets = counted_targets(data.micro_batches);
    numbers.losses.push_back(
        loss_of_step(runner.train_step(data.micro_batches, {7, step, targets}, ranks.between), targets));
    numbers.norms.push_back(engine.step().gradient_norm);
    numbers.losses.push_back(runner.evaluate(data.micro_batches[step]));
  }
  Values values;
  engine::UnitSink sink;
  sink.parameter = [&](engine::ParameterId parameter, std::size_t, std::size_t count, ConstArray of_file) {
    std::vector<float>& own = values[layout.spec(parameter).name];
    for (std::size_t i = 0; i < count; ++i) own.push_back(test::value_at(of_file, i));
  };
  // The first data rank gets what the others have.
  if (ranks.data != nullptr && ranks.data->rank() > 0) sink = {};
  for (engine::UnitId unit = 0; unit < model.units().size(); ++unit) engine.save(unit, sink);
  return values;
}

// Each section has an engine of its own, with a plan of its own; the whole model is in memory, in groups of
// one. Without masters updates round by random numbers, which are those of the whole model, too.
TEST(SectionsOnEngines, TrainWhatTheWholeModelTrains) {
  for (const Way& way :
       {Way{"memory", k1F1B, {3}, 1}, Way{"disk", k1F1B, {2, 4}, 2}, Way{"disk", kGPipe, {4}, 1},
        Way{"memory", kGPipe, {2, 3, 4}, 5}, Way{"disk", k1F1B, {3}, 1, true, false},
        Way{"memory", k1F1B, {4}, 3, false, true}, Way{"disk", kGPipe, {2}, 1, false, false},
        Way{"memory", k1F1B, {2, 3, 5}, 1, true, true, 2}, Way{"disk", k1F1B, {2, 4, 5}, 2, true, false, 2},
        Way{"disk", kGPipe, {2, 3, 4}, 1, false, true, 2}, Way{"memory", kZbH1, {2, 4}, 1},
        Way{"disk", kZbH1, {3}, 1, true, false}, Way{"disk", kZbH1, {2, 3, 4}, 2, false, true}}) {
    SCOPED_TRACE(fmt::format("{}, {}, {} ranges, {} chunks, groups of {}, {}, {}", way.tier,
                             engine::name_of(way.order), way.cut.size() + 1, way.chunks, way.group,
                             way.tied ? "tied" : "untied", way.clip ? "clipped" : "not clipped"));
    const Model model(small_mixed(way.tied, 0.1f), Dtype::kBf16, 2, 8);
    const Data data(model, kMicroBatches);
    Numbers expected_numbers;
    const Values expected =
        train_on_engine(model, data, {"memory", way.order, {}, 1, way.tied, way.clip}, {}, expected_numbers);
    const auto sections = sections_of(way.cut, way.chunks, model.config());
    std::vector<Values> found(sections.size());
    std::vector<Numbers> numbers(sections.size());
    comm::run_communicators(
        comm::World::kThreads, static_cast<int>(sections.size()), [&](comm::Communicator& communicator) {
          const auto section = static_cast<std::size_t>(communicator.rank());
          const Model own(model, sections[section]);
          MessageNeighbours neighbours(communicator);
          const Place place{{way.order, communicator.size(), divide_up(kMicroBatches, way.group), way.chunks},
                            communicator.rank(),
                            &neighbours};
          found[section] = train_on_engine(own, data, way, place, numbers[section], {&communicator});
        });
    EXPECT_EQ(numbers.back().losses, expected_numbers.losses);
    Values all;
    for (std::size_t section = 0; section < found.size(); ++section) {
      EXPECT_EQ(numbers[section].norms, expected_numbers.norms) << section;
      for (const auto& [name, values] : found[section])
        EXPECT_TRUE(expected.at(name) == values) << name << " of section " << section;
      all.merge(found[section]);
    }
    EXPECT_EQ(all.size(), expected.size());
  }
}

// Where a rank of the run is held back: before a message, or between ops.
class Hold {
 public:
  Hold() = default;
  explicit Hold(std::size_t at) : at_(at) {}
  void pass() {
    if (passed_++ == at_) std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
  std::size_t passed() const { return passed_; }

 private:
  std::size_t at_ = std::numeric_limits<std::size_t>::max(), passed_ = 0;
};

class HeldNeighbours : public Neighbours {
 public:
  HeldNeighbours(comm::Communicator& sections, Hold& hold) : messages_(sections), hold_(hold) {}
  void begin(const engine::Action& message, std::span<std::byte> bytes) override {
    hold_.pass();
    messages_.begin(message, bytes);
  }
  void await(const engine::Action& message) override {
    hold_.pass();
    messages_.await(message);
  }

 private:
  MessageNeighbours messages_;
  Hold& hold_;
};

// Waits of a section and waits of its data ranks never go round: a rank that is late makes the others late.
TEST(RanksOfAMesh, HaveTheSameBitsWhicheverIsHeldBack) {
  const comm::Mesh mesh = comm::Mesh::parse("data=2,pipeline=2");
  for (const Way& way :
       {Way{"memory", k1F1B, {3}, 1, true, true, 1, 3}, Way{"disk", k1F1B, {2, 3, 5}, 1, true, true, 2, 2},
        Way{"memory", kZbH1, {3}, 1, true, true, 1, 2}}) {
    SCOPED_TRACE(fmt::format("{}, {} chunks, ZeRO {}", engine::name_of(way.order), way.chunks, way.zero));
    const Model model(small_mixed(way.tied, 0.1f), Dtype::kBf16, 2, 8);
    const Data data[] = {Data(model, kMicroBatches, 3), Data(model, kMicroBatches, 4)};
    const auto sections = sections_of(way.cut, way.chunks, model.config());
    struct Run {
      std::vector<Hold> holds = std::vector<Hold>(4);
      std::vector<Values> values = std::vector<Values>(4);
      std::vector<Numbers> numbers = std::vector<Numbers>(4);
    };
    const auto train = [&](Run& run) {
      comm::run_communicators(comm::World::kThreads, mesh.ranks(), [&](comm::Communicator& all) {
        const auto rank = static_cast<std::size_t>(all.rank());
        const auto of_sections = all.group(mesh.along(all.rank(), "pipeline"));
        const auto of_data = all.group(mesh.along(all.rank(), "data"));
        const Model own(model, sections[static_cast<std::size_t>(of_sections->rank())]);
        HeldNeighbours neighbours(*of_sections, run.holds[rank]);
        const Place place{{way.order, 2, kMicroBatches, way.chunks}, of_sections->rank(), &neighbours};
        run.values[rank] =
            train_on_engine(own, data[of_data->rank()], way, place, run.numbers[rank],
                            {of_sections.get(), of_data.get(), [&] { run.holds[rank].pass(); }});
      });
    };
    Run expected;
    train(expected);
    for (std::size_t rank = 0; rank < 4; ++rank) {
      const std::size_t all = expected.holds[rank].passed();
      ASSERT_GT(all, 20u);
      for (std::size_t at = 0; at < all; at += divide_up(all, 3)) {
        Run run;
        run.holds[rank] = Hold(at);
        train(run);
        EXPECT_GT(run.holds[rank].passed(), at);
        for (std::size_t other = 0; other < 4; ++other) {
          EXPECT_TRUE(run.values[other] == expected.values[other]) << other << ": " << rank << " at " << at;
          EXPECT_EQ(run.numbers[other].norms, expected.numbers[other].norms);
          EXPECT_EQ(run.numbers[other].losses, expected.numbers[other].losses);
        }
      }
    }
  }
}

// Weights apart take no other seconds in sum, nor more memory than what is kept and left for them.
TEST(SectionOfAModel, IsPlannedWithWeightsApart) {
  const Model model(with_layers(small_gpt2(true), 6), Dtype::kF32, 2, 8);
  const auto library = kernels::load_matrix_library(1);
  const auto optimizer = optim::make_optimizer({});
  for (int section = 0; section < 3; ++section) {
    const Model own(model, {{static_cast<engine::UnitId>(section == 0 ? 0 : 1 + 2 * section),
                             static_cast<engine::UnitId>(section == 2 ? 8 : 3 + 2 * section)}});
    std::map<engine::PipelineOrder, engine::Plan> plans;
    std::map<engine::PipelineOrder, engine::Profile> profiles;
    for (const engine::PipelineOrder order : {k1F1B, kZbH1}) {
      const engine::Profile once = own.profile(kMicroBatches, *library, 0, engine::splits_backward(order));
      profiles[order] = engine::in_pipeline(once, {order, 3, kMicroBatches}, section, 1);
      engine::PlanRequest request;
      request.recompute = "none";
      plans[order] = engine::make_plan(profiles[order], *optimizer, {kGiB, 0, 0}, request, {});
    }
    EXPECT_NEAR(plans[kZbH1].time.step, plans[k1F1B].time.step, 1e-6 * plans[k1F1B].time.step);
    const engine::WholeStep& step = *profiles[kZbH1].whole_step;
    std::size_t more = 0;
    for (const engine::UnitProfile& unit : profiles[kZbH1].unit_profiles) {
      const engine::ActivationChoice& choice = unit.choices.front();
      more += (step.kept_for_weights - step.held.front()) * choice.kept_for_weights_bytes +
              step.left_for_weights * choice.left_for_weights_bytes;
    }
    EXPECT_GT(more, 0u);
    EXPECT_EQ(plans[kZbH1].activation_bytes, plans[k1F1B].activation_bytes + more);
  }
}

TEST(SectionOfAModel, HasItsUnitsAndTheirNumbersInTheModel) {
  const Model whole(small_mixed(), Dtype::kF32, 1, 8);
  const engine::Layout layout(whole.units());
  const Model last(whole, {{4, 7}});
  std::vector<std::string> names;
  for (const engine::UnitSpec& unit : last.units()) names.push_back(unit.name);
  EXPECT_THAT(names, ::testing::ElementsAre("embedding", "block.3", "block.4", "final"));
  const engine::Layout own(last.units());
  for (engine::ParameterId p = 0; p < own.parameters(); ++p)
    for (engine::ParameterId other = 0; other < layout.parameters(); ++other)
      if (layout.spec(other).name == own.spec(p).name) {
        EXPECT_EQ(own.logical_index(p), layout.logical_index(other)) << own.spec(p).name;
      }
  EXPECT_EQ(last.impl().first(), 1u);
  EXPECT_EQ(last.impl().first_op(1), whole.impl().first_op(4));
}

}  // namespace sluice::models::testing::pipeline_test
