#pragma once
#include "core/bytes.h"
#include "engine/planner/planner.h"
#include "engine/saved_values.h"
#include "engine/steps/any_order_engine.h"
#include "engine/steps/scheduled_engine.h"
#include "kernels/matrix.h"
#include "offload/test_files.h"

// A model with a parameter that may span units, and a client that trains it by the elements of the logical
// parameters, so that it does not see how they are cut.
namespace sluice::engine::spans {

inline constexpr std::size_t kGrain = kSpanGrain;
using Shape = std::vector<std::size_t>;

struct Case {
  optim::OptimizerSettings optimizer;
  Shape shape = {2600, 1003};  // no row of the parameter ends where a span does
  Dtype dtype = Dtype::kF32;
  bool spans = true, any_order = true, clip = true;
  const char* parameters = "memory";
  const char* gradients = "memory";
  const char* state = "memory";
  std::size_t chunk = kChunkGrain, prefetch = 1;
  int micro_batches = 1;
  double norm = 0, clip_value = 0, factor = 1;
  int skipped = -1;  // the step in which the parameter gets no gradient
  bool frozen = false;
};

inline Case on_disk(Case setup) {
  setup.parameters = setup.gradients = setup.state = "disk";
  return setup;
}

// The parameter's name. Before and after it are smaller units, one of which has rounds of its own.
inline std::vector<UnitSpec> units_of(const Case& setup) {
  std::vector<UnitSpec> units = {{"before", {{"a", {300, 70}}, {"b", {70}}}}};
  const ParameterSpec table{"table", setup.shape};
  if (!setup.spans) units.push_back({"table", {table}});
  for (std::size_t first = 0; setup.spans && first < table.elements(); first += kGrain) {
    ParameterSpec span = table;
    span.span_first = first;
    span.span_elements = std::min(kGrain, table.elements() - first);
    units.push_back({fmt::format("table[{}:]", first), {span}});
  }
  for (UnitSpec& unit : units) unit.trainable = unit.name == "before" || !setup.frozen;
  units.push_back({"after", {{"c", {900, 800}}}});
  for (UnitSpec& unit : units) unit.dtype = setup.dtype;
  return units;
}

inline Profile profile_of(const Case& setup) {
  Profile profile = any_order_profile(units_of(setup), 1);
  profile.any_order = setup.any_order;
  profile.micro_batches = setup.any_order ? 1 : static_cast<std::size_t>(setup.micro_batches);
  profile.tokens = 1;
  return profile;
}

inline PlanRequest request_of(const Case& setup) {
  PlanRequest request;
  request.clip = setup.clip;
  request.group = 1;
  request.prefetch = setup.prefetch;
  request.chunk_elements = setup.chunk;
  request.places = {tier_of_place(setup.parameters), tier_of_place(setup.gradients),
                    tier_of_place(setup.state)};
  return request;
}

inline float noise(std::size_t parameter, std::size_t element, int step, int micro_batch) {
  const auto mixed =
      static_cast<std::uint32_t>(element * 2654435761U + parameter * 40503U +
                                 static_cast<std::size_t>(step * 97 + micro_batch * 57) * 7919U);
  return static_cast<float>((mixed ^ mixed >> 15) % 1021) * 0.001f - 0.51f;
}

struct Outcome : SavedValues {
  std::vector<double> losses;
  bool operator==(const Outcome&) const = default;
};

// Makes the kind of engine that the profile asks for.
inline std::unique_ptr<Engine> make_engine(const Profile& profile, const Plan& plan,
                                           const optim::Optimizer& optimizer, const Resources& resources) {
  if (profile.any_order) return std::make_unique<AnyOrderEngine>(profile, plan, optimizer, resources);
  return std::make_unique<ScheduledEngine>(profile, plan, optimizer, resources);
}

// A client that computes with the elements of the logical parameters, so that it does not see how they are
// cut.
class Client {
 public:
  Client(const Case& setup, Engine& engine)
      : setup_(setup),
        engine_(engine),
        layout_(engine.layout()),
        scheduled_(dynamic_cast<ScheduledEngine*>(&engine)),
        any_order_(dynamic_cast<AnyOrderEngine*>(&engine)) {}

  void load() {
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit) engine_.load(unit, start());
  }

  double step(int step) {
    const StepSettings settings = settings_of(step);
    any_order_ != nullptr ? any_order_->begin_step(settings) : scheduled_->begin_step(settings);
    double loss = 0;
    for (int m = 0; m < setup_.micro_batches; ++m) {
      for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
        acquire({unit, true, -1, false});
        loss += seen(unit);
        release({unit, true, -1, false});
      }
      for (UnitId unit = static_cast<UnitId>(layout_.units().size()); unit-- > 0;) backward(unit, step, m);
    }
    any_order_ != nullptr ? any_order_->step(settings) : scheduled_->step();
    return loss;
  }

  Outcome save() {
    Outcome outcome;
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
      engine_.save(unit, sink_of(outcome, layout_));
    return outcome;
  }

  StepSettings settings_of(int step) const {
    StepSettings settings = {{{0.02 / (step + 1), 0.1}}, setup_.norm};
    settings.gradient_factor = setup_.factor;
    settings.clip_value = setup_.clip_value;
    return settings;
  }

  void add(UnitId unit, ConstArray gradient) {
    any_order_->acquire(unit, Hold::kGradientOnly);
    any_order_->add_gradient(layout_.first_parameter(unit), gradient);
    any_order_->release(unit);
  }

 private:
  void acquire(const Access& access) {
    if (any_order_ != nullptr)
      any_order_->acquire(access.unit, access.gradient_use < 0 ? Hold::kRead : Hold::kGradient);
    else
      scheduled_->acquire(access);
  }

  void release(const Access& access) {
    any_order_ != nullptr ? any_order_->release(access.unit) : scheduled_->release(access);
  }

  UnitSource start() const {
    UnitSource source;
    source.values = [this](ParameterId p, std::size_t first, std::span<float> out) {
      const std::size_t index = layout_.logical_index(p), begin = layout_.spec(p).span_first + first;
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = noise(index, begin + i, -1, 0);
    };
    return source;
  }

  double seen(UnitId unit) const {
    double sum = 0;
    for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
      const ConstArray values = engine_.parameter(p);
      const std::size_t first = layout_.spec(p).span_first;
      for (std::size_t i = round_up(first, 97) - first; i < layout_.location(p).elements; i += 97)
        sum +=
            std::ldexp(std::nearbyint(std::ldexp(test::value_at(values, i), 20)), -20);  // exact in any order
    }
    return sum;
  }

  void backward(UnitId unit, int step, int m) {
    const bool frozen = !layout_.trainable(unit);
    const bool skips = frozen || (step == setup_.skipped && layout_.units()[unit].name.starts_with("table"));
    const bool last = !frozen && m + 1 == setup_.micro_batches;
    const Access access = {unit, true, skips && (setup_.any_order || frozen) ? -1 : 0, last};
    acquire(access);
    for (ParameterId p = layout_.first_parameter(unit); !skips && p < layout_.end_parameter(unit); ++p) {
      const std::size_t n = layout_.location(p).elements;
      std::vector<float> gradient(n);
      const std::size_t from = layout_.spec(p).span_first * 31 + layout_.logical_index(p) * 41;
      test::mix_with_noise(n, engine_.parameter(p), {0.1f, 0.01f, -0.51f},
                           from + static_cast<std::size_t>(step * 97 + m * 57), false, gradient.data());
      if (any_order_ != nullptr) {
        any_order_->add_gradient(p, {gradient.data(), Dtype::kF32});
        continue;
      }
      const GradientTarget target = scheduled_->gradient(p, 0, static_cast<std::size_t>(m));
      for (std::size_t i = 0; i < n; ++i)
        target.data[i] = gradient[i] + (target.accumulate ? target.data[i] : 0.0f);
    }
    engine_.progress();
    release(access);
  }

  const Case& setup_;
  Engine& engine_;
  const Layout& layout_;
  ScheduledEngine* scheduled_;  // the other pointer is null
  AnyOrderEngine* any_order_;
};

// An engine with exactly the memory that its plan states.
struct Made {
  explicit Made(const Case& setup, const offload::Faults& faults = {})
      : profile(profile_of(setup)),
        optimizer(optim::make_optimizer(setup.optimizer)),
        plan(make_plan(profile, *optimizer, {2 * kGiB, kGiB, 0}, request_of(setup), {})) {
    ledger.set_budget(allocator::Tier::kHost, plan.peak_memory);
    disk.emplace(offload::alone(make_faulty_file(*memory, faults)), ledger);
    engine = make_engine(profile, plan, *optimizer, {threads, ledger, &*disk, nullptr, products.get()});
  }
  AnyOrderEngine& any_order() { return dynamic_cast<AnyOrderEngine&>(*engine); }
  Profile profile;
  std::unique_ptr<optim::Optimizer> optimizer;
  Plan plan;
  Threads threads{2};
  std::unique_ptr<kernels::F32Products> products = kernels::load_matrix_library(2);
  allocator::Ledger ledger;
  const std::unique_ptr<offload::File> memory = offload::make_memory_file("disk");
  std::optional<offload::RecordStore> disk;
  std::unique_ptr<Engine> engine;
};

inline Outcome train(const Case& setup, int steps = 2) {
  Made made(setup);
  Client client(setup, *made.engine);
  client.load();
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) losses.push_back(client.step(step));
  Outcome outcome = client.save();
  outcome.losses = losses;
  return outcome;
}

inline Outcome in_one_unit(Case setup, int steps = 2) {
  setup.spans = false;
  return train(setup, steps);
}

inline void expect_same(const Outcome& found, const Outcome& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  ASSERT_EQ(found.values.at("table").size(), expected.values.at("table").size());
  EXPECT_TRUE(found == expected) << "parameters or optimizer state differ";
}

}  // namespace sluice::engine::spans
