#pragma once
#include "core/bytes.h"
#include "core/random.h"
#include "engine/steps/scheduled_engine.h"
#include "float_array.h"
#include "offload/file.h"
#include "testing.h"

// A model without a matrix product: each parameter is pulled towards a value that depends on the micro-batch.
// It has a tied unit (two uses), units of several sizes, and reads what it acquires, so that wrong bytes show
// in the losses.
namespace sluice::engine::toy {

using Types = std::vector<Dtype>;  // types of units, in turn

inline Profile profile(std::size_t micro_batches, const Types& types = {Dtype::kF32},
                       std::size_t blocks = 3) {
  Profile profile;
  profile.micro_batches = micro_batches;
  profile.tokens = 1;
  profile.units.push_back({"embedding", {{"wte", {300, 2048}, 0, 2}, {"wpe", {7, 100}, 0, 1}}});
  profile.units.back().parameters[0].by_elements = true;
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::string name = "block." + std::to_string(i);
    profile.units.push_back({name, {{name + ".weight", {120, 5000}, 0, 1}, {name + ".bias", {1000}, 1, 1}}});
  }
  profile.units.push_back({"final", {{"final.gamma", {1000}, 1, 1}}});
  for (std::size_t u = 0; u < profile.units.size(); ++u) profile.units[u].dtype = types[u % types.size()];
  const auto last = static_cast<UnitId>(blocks + 1);
  profile.schedule.push_back({0, true, -1, false});
  for (UnitId u = 1; u <= blocks; ++u) profile.schedule.push_back({u, true, -1, false});
  profile.schedule.push_back({last, true, 0, true});
  profile.schedule.push_back({0, true, 0, false});
  for (UnitId u = static_cast<UnitId>(blocks); u >= 1; --u) profile.schedule.push_back({u, true, 0, true});
  profile.schedule.push_back({0, false, 1, true});
  profile.unit_profiles.resize(profile.units.size());
  for (UnitProfile& unit : profile.unit_profiles) {
    unit.forward.attention = unit.backward.attention = 1e6;
    unit.input_bytes = 4096;
    unit.choices = {{"none", 8192, {}, 4096}, {"full", 0, {{}, 1e6, 0}, 4096}};
  }
  return profile;
}

// The tiers of parameters, gradients and state of every unit.
inline auto places(const std::string& parameters, const std::string& gradients, const std::string& state) {
  return decltype(PlanRequest::places){tier_of_place(parameters), tier_of_place(gradients),
                                       tier_of_place(state)};
}
inline auto places(const std::string& all) { return places(all, all, all); }

// Group 0 decays, group 1 does not.
inline StepSettings settings(double learning_rate, double weight_decay, double clip) {
  return {{{learning_rate, weight_decay}, {learning_rate, 0}}, clip};
}

inline float start_value(ParameterId parameter, std::size_t i) {
  const std::uint32_t mixed = static_cast<std::uint32_t>(i) * 2654435761U + parameter * 40503U + 7;
  return to_unit_interval(mixed ^ mixed >> 15) - 0.5f;
}

inline UnitSource start_values() {
  UnitSource source;
  source.values = [](ParameterId p, std::size_t first, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = start_value(p, first + i);
  };
  return source;
}

struct Outcome {
  std::vector<double> losses;  // of each step
  std::vector<double> norms;
  std::vector<std::vector<float>> values, masters;        // by parameter
  std::array<std::vector<std::vector<float>>, 3> states;  // by array of the optimizer, and parameter
  std::vector<std::vector<float>> wholes;                 // in the order in which they are saved
  bool operator==(const Outcome&) const = default;
};

class Trainer {
 public:
  Trainer(const Profile& profile, const Plan& plan, ScheduledEngine& engine)
      : profile_(profile), plan_(plan), engine_(engine) {}
  // Its activations are in memory that it lends; it throws where what it keeps there has changed.
  Trainer(const Profile& profile, const Plan& plan, ScheduledEngine& engine, std::span<std::byte> activations)
      : Trainer(profile, plan, engine) {
    activations_ = activations;
    engine.set_lendable(activations);
  }
  ~Trainer() { engine_.end_lending(); }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  double step(const StepSettings& settings, double* norm = nullptr) {
    engine_.begin_step(settings);
    // Added up at the end, so that their sum has one order.
    std::vector<double> losses(profile_.micro_batches);
    for (std::size_t i = 0; i < profile_.repeats(plan_.group) * profile_.schedule.size(); ++i) {
      const std::size_t item =
          profile_.whole_step ? profile_.whole_step->parts[i].item : i / profile_.schedule.size();
      access(profile_.schedule[i % profile_.schedule.size()], item * plan_.group, losses);
    }
    if (before_step) before_step();
    const StepResult result = engine_.step();
    if (norm != nullptr) *norm = result.gradient_norm;
    return std::accumulate(losses.begin(), losses.end(), 0.0);
  }

  float gradient_scale = 1;
  std::size_t first_micro_batch = 0;    // of this rank in a step
  std::function<void()> before_access;  // is called before each access, if it is there
  std::function<void()> before_step;    // called when all gradients are written

 private:
  void access(const Access& access, std::size_t first, std::vector<double>& losses) {
    const std::size_t end = std::min(first + plan_.group, profile_.micro_batches);
    if (before_access) before_access();
    claim(access);
    engine_.acquire(access);
    const Layout& layout = engine_.layout();
    for (std::size_t m = first; m < end; ++m)
      for (ParameterId p = layout.first_parameter(access.unit); p < layout.end_parameter(access.unit); ++p)
        visit(access, p, m, losses[m]);
    engine_.progress();
    if (access.gradient_use == 0 && profile_.units[access.unit].name == "final") {
      waiting_ = &access;
      return;
    }
    engine_.release(access);
    if (waiting_ != nullptr) engine_.release(*std::exchange(waiting_, nullptr));
    if (end == profile_.micro_batches && access.final) engine_.lend(access.unit * area());
  }

  std::size_t area() const { return activations_.size() / profile_.units.size(); }  // of a unit

  // Forward writes what backward finds again.
  void claim(const Access& access) {
    const auto unit = static_cast<std::byte>(access.unit + 1);
    const std::span<std::byte> own = activations_.subspan(access.unit * area(), area());
    if (access.gradient_use < 0) {
      engine_.take_back((access.unit + 1) * area());
      std::ranges::fill(own, unit);
    } else if (profile_.units[access.unit].name == "final") {
      engine_.take_back(activations_.size());
    } else if (!own.empty() &&
               (own[0] != unit || std::memcmp(own.data(), own.data() + 1, own.size() - 1) != 0)) {
      throw std::logic_error("the activations of " + profile_.units[access.unit].name + " were overwritten");
    }
  }

  void visit(const Access& access, ParameterId p, std::size_t m, double& loss) {
    const std::size_t n = engine_.layout().location(p).elements;
    const ConstArray values = access.parameters ? engine_.parameter(p) : ConstArray{};
    if (access.gradient_use < 0) {
      for (std::size_t i = 0; i < n; i += 97) loss += std::abs(test::value_at(values, i));
      return;
    }
    if (access.gradient_use >= engine_.layout().spec(p).uses) return;
    const GradientTarget target = engine_.gradient(p, access.gradient_use, m);
    const test::Mix mix{gradient_scale, -0.01f * gradient_scale,
                        access.parameters ? 0 : 0.3f * gradient_scale};
    test::mix_with_noise(n, values, mix, (first_micro_batch + m) * 17, target.accumulate, target.data);
  }

  const Profile& profile_;
  const Plan& plan_;
  ScheduledEngine& engine_;
  std::span<std::byte> activations_;
  const Access* waiting_ = nullptr;  // set while the tied unit is held and the head uses it
};

// `arrays` is how many the optimizer has.
inline UnitSink collect(Outcome& outcome,
                        std::vector<optim::StateArray> arrays = optim::make_optimizer({})->state()) {
  UnitSink sink;
  const auto append = [](std::vector<std::vector<float>>& all, ParameterId p, std::size_t first,
                         std::span<const float> values) {
    if (all.size() <= p) all.resize(p + 1);
    if (all[p].size() != first) throw std::logic_error("values come out of order");
    all[p].insert(all[p].end(), values.begin(), values.end());
  };
  const auto widened = [](std::size_t count, ConstArray values) {
    std::vector<float> wide(count);
    test::widen(count, values, wide.data());
    return wide;
  };
  sink.parameter = [&outcome, append, widened](ParameterId p, std::size_t first, std::size_t count,
                                               ConstArray values) {
    append(outcome.values, p, first, widened(count, values));
  };
  sink.master = [&outcome, append](ParameterId p, std::size_t first, std::span<const float> v) {
    append(outcome.masters, p, first, v);
  };
  const auto decoded = [arrays = std::move(arrays)](std::size_t count, std::size_t array, ConstArray codes,
                                                    const float* scales) {
    std::vector<float> wide(count);
    optim::decode(count, arrays[array].map, static_cast<const std::uint8_t*>(codes.data), scales,
                  wide.data());
    return wide;
  };
  sink.whole = [&outcome](ParameterId, std::size_t, std::span<const float> values) {
    outcome.wholes.emplace_back(values.begin(), values.end());
  };
  sink.state = [&outcome, append, widened, decoded](ParameterId p, std::size_t array, std::size_t first,
                                                    std::size_t count, ConstArray values,
                                                    const float* scales) {
    append(outcome.states[array], p, first,
           values.type == Dtype::kU8 ? decoded(count, array, values, scales) : widened(count, values));
  };
  return sink;
}

}  // namespace sluice::engine::toy
