#pragma once
#include <new>

#include "float_array.h"
#include "kernels/matrix.h"
#include "models/model/executor.h"
#include "models/model/model.h"
#include "testing.h"

namespace sluice::models::testing {

inline constexpr std::byte kGuard{0xa5};

// Bytes at an aligned address, between guards that must not be touched.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes) : bytes_(bytes), all_(bytes + 3 * kMargin, kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(all_.data()) + kMargin;
    data_ = reinterpret_cast<std::byte*>(round_up(address, kMargin));
  }
  std::span<std::byte> bytes() const { return {data_, bytes_}; }
  bool guards_hold() const {
    for (const std::byte* at = all_.data(); at < all_.data() + all_.size(); ++at) {
      if ((at < data_ || at >= data_ + bytes_) && *at != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kMargin = 4096;
  std::size_t bytes_;
  std::vector<std::byte> all_;
  std::byte* data_;
};

// Replaces an engine by plain memory: values, and an accumulator for each use. It checks the schedule.
class PlainSource : public ParameterSource {
 public:
  PlainSource(const Model& model, const engine::Profile& profile)
      : dtype_(model.impl().shape.dtype),
        part_(model.impl().shape.cut.rank),
        schedule_(profile.schedule),
        written_(profile.written) {
    for (engine::UnitId unit = 0; unit < model.units().size(); ++unit) {
      for (const engine::ParameterSpec& spec : model.units()[unit].parameters) {
        specs_.push_back(spec);
        units_.push_back(unit);
        std::size_t elements = 1;
        for (const std::size_t dimension : spec.shape) elements *= dimension;
        elements_.push_back(elements);
        values_.emplace_back(elements * size_of(dtype_));
        gradients_.emplace_back();
        for (int use = 0; use < spec.uses; ++use) gradients_.back().emplace_back(elements * sizeof(float));
        last_.emplace_back(spec.uses, -1);
      }
    }
  }

  std::size_t parameters() const { return specs_.size(); }
  const engine::ParameterSpec& spec(std::size_t parameter) const { return specs_[parameter]; }
  std::size_t elements(std::size_t parameter) const { return elements_[parameter]; }

  void set(std::size_t parameter, std::size_t element, float value) {
    test::set_value({values_[parameter].bytes().data(), dtype_}, element, value);
  }
  float get(std::size_t parameter, std::size_t element) const {
    return test::value_at({values_[parameter].bytes().data(), dtype_}, element);
  }

  // From now on the gradients of a use, so many in a step, are not added but kept one after another.
  void keep_apart(std::size_t gradients) {
    apart_ = gradients;
    for (std::size_t parameter = 0; parameter < parameters(); ++parameter)
      for (GuardedMemory& use : gradients_[parameter])
        use = GuardedMemory(gradients * elements_[parameter] * sizeof(float));
  }
  // Returns those of a use, in their order; zeros where it was never written.
  std::vector<float> kept_apart(std::size_t parameter, int use) const {
    std::vector<float> all(apart_ * elements_[parameter]);
    if (last_[parameter].at(static_cast<std::size_t>(use)) >= 0)
      std::memcpy(all.data(), gradients_[parameter][static_cast<std::size_t>(use)].bytes().data(),
                  all.size() * sizeof(float));
    return all;
  }

  // Returns the sum over uses, of which one that was never written is zero, as is what this rank does not
  // write where ranks compute parts of layers.
  std::vector<float> gradient_of(std::size_t parameter) const {
    std::vector<float> sum(elements_[parameter], 0.0f);
    for (std::size_t use = 0; use < gradients_[parameter].size(); ++use) {
      if (last_[parameter][use] < 0) continue;
      const auto* data = reinterpret_cast<const float*>(gradients_[parameter][use].bytes().data());
      const comm::Given::OfRank whole{{0, sum.size()}};
      for (const comm::Runs& runs : written_.empty() ? whole : written_[parameter][use][part_])
        for (std::size_t run = 0; run < runs.count; ++run)
          for (std::size_t i = 0; i < runs.size; ++i) {
            const std::size_t at = runs.first + run * runs.stride + i;
            sum[at] += data[at];
          }
    }
    return sum;
  }
  std::vector<std::vector<float>> all_gradients() const {
    std::vector<std::vector<float>> all;
    for (std::size_t parameter = 0; parameter < parameters(); ++parameter)
      all.push_back(gradient_of(parameter));
    return all;
  }

  // Does what an engine's begin_step() does. Former contents of gradients must not matter.
  void begin_step() {
    for (std::size_t parameter = 0; parameter < parameters(); ++parameter) {
      for (GuardedMemory& use : gradients_[parameter])
        std::memset(use.bytes().data(), 0xff, use.bytes().size());
      std::fill(last_[parameter].begin(), last_[parameter].end(), -1);
    }
    next_ = 0;
  }
  bool whole_groups() const { return next_ % schedule_.size() == 0; }
  bool guards_hold() const {
    for (const GuardedMemory& memory : values_) {
      if (!memory.guards_hold()) return false;
    }
    for (const auto& uses : gradients_) {
      for (const GuardedMemory& memory : uses) {
        if (!memory.guards_hold()) return false;
      }
    }
    return true;
  }

  void acquire(const engine::Access& access) override {
    engine::Access next = schedule_[next_++ % schedule_.size()];
    next.final = access.final;  // in a whole step only the schedule knows this
    require(access == next, "an acquire out of the schedule's order");
    held_.push_back(access);
  }
  void release(const engine::Access& access) override {
    const auto found = std::find(held_.begin(), held_.end(), access);
    require(found != held_.end(), "a release of what is not held");
    held_.erase(found);
  }
  void acquire_for_reading(engine::UnitId unit) override { reading_.insert(unit); }
  void release_from_reading(engine::UnitId unit) override {
    require(reading_.erase(unit) == 1, "not being read");
  }

  ConstArray value(engine::ParameterId parameter) override {
    bool there = reading_.count(units_[parameter]) > 0;
    for (const engine::Access& access : held_)
      there = there || (access.unit == units_[parameter] && access.parameters);
    require(there, "a parameter is read without its unit");
    return {values_[parameter].bytes().data(), dtype_};
  }
  engine::GradientTarget gradient(engine::ParameterId parameter, int use, std::size_t micro_batch) override {
    bool there = false;
    for (const engine::Access& access : held_) {
      there = there || (access.unit == units_[parameter] && access.gradient_use == use);
    }
    require(there, "a gradient is written without its unit");
    auto& last = last_[parameter].at(static_cast<std::size_t>(use));
    require(last < static_cast<std::ptrdiff_t>(micro_batch), "micro-batches out of order");
    const bool accumulate = last >= 0 && apart_ == 0;
    last = static_cast<std::ptrdiff_t>(micro_batch);
    auto* data = gradients_[parameter][static_cast<std::size_t>(use)].bytes().data();
    return {reinterpret_cast<float*>(data) + (apart_ == 0 ? 0 : micro_batch * elements_[parameter]),
            accumulate};
  }
  void progress() override {}

 private:
  static void require(bool condition, const char* text) {
    if (!condition) throw std::logic_error(text);
  }

  Dtype dtype_;
  std::size_t part_;  // of layers, which this rank computes
  std::vector<engine::Access> schedule_;
  std::vector<std::vector<engine::WrittenElements>> written_;
  std::vector<engine::ParameterSpec> specs_;
  std::vector<engine::UnitId> units_;
  std::vector<std::size_t> elements_;
  std::vector<GuardedMemory> values_;
  std::vector<std::vector<GuardedMemory>> gradients_;
  std::vector<std::vector<std::ptrdiff_t>> last_;
  std::vector<engine::Access> held_;
  std::multiset<engine::UnitId> reading_;
  std::size_t next_ = 0;
  std::size_t apart_ = 0;  // gradients of a use that are kept apart; 0: they are added
};

// Returns each unit's choice of that name, or its first one where it has none.
inline std::vector<std::size_t> choices_named(const Model& model, const std::string& name) {
  std::vector<std::size_t> indices;
  for (engine::UnitId unit = 0; unit < model.units().size(); ++unit) {
    const std::vector<Choice> choices = model.impl().choices(unit);
    std::size_t index = 0;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (choices[i].name == name) index = i;
    }
    indices.push_back(index);
  }
  return indices;
}

// As a plan computes it.
inline std::size_t planned_workspace(const engine::Profile& profile, std::span<const std::size_t> choices) {
  std::size_t most = 0;
  for (std::size_t unit = 0; unit < choices.size(); ++unit)
    most = std::max(most, profile.unit_profiles[unit].choices[choices[unit]].workspace_bytes);
  return profile.workspace_bytes + most;
}

// A model with plain memory of the planned size.
class PlainRun {
 public:
  PlainRun(const Model& model, const std::string& choice, std::size_t group, std::size_t micro_batches,
           Threads& threads, kernels::MatrixLibrary& library, const LayerRanks& layers = {})
      : profile(model.profile(micro_batches, library)),
        source(model, profile),
        executor(model.impl(), choices(model, choice), group, {source, threads, library, nullptr, layers}),
        activations_(engine::activation_bytes(profile, choices_named(model, choice), group)),
        workspace_(planned_workspace(profile, choices_named(model, choice))) {
    executor.set_memory(activations_.bytes(), workspace_.bytes());
  }

  // Losses of each micro-batch, where so many targets count in all.
  std::vector<double> train_losses(std::span<const MicroBatch> micro_batches, std::uint64_t targets,
                                   std::uint64_t seed = 1, std::uint64_t step = 1, float loss_scale = 1) {
    source.begin_step();
    std::vector<double> losses = executor.train_step(micro_batches, {seed, step, targets, loss_scale}, {});
    if (!source.whole_groups()) throw std::logic_error("a group did not follow the whole schedule");
    return losses;
  }
  double train(std::span<const MicroBatch> micro_batches, std::uint64_t seed = 1, std::uint64_t step = 1,
               float loss_scale = 1) {
    const std::uint64_t targets = counted_targets(micro_batches);
    return loss_of_step(train_losses(micro_batches, targets, seed, step, loss_scale), targets);
  }
  bool guards_hold() const {
    return source.guards_hold() && activations_.guards_hold() && workspace_.guards_hold();
  }
  std::span<std::byte> activations() const { return activations_.bytes(); }
  std::span<std::byte> workspace() const { return workspace_.bytes(); }

  const engine::Profile profile;
  PlainSource source;
  Executor executor;

 private:
  static std::vector<Choice> choices(const Model& model, const std::string& name) {
    std::vector<Choice> result;
    const std::vector<std::size_t> indices = choices_named(model, name);
    for (engine::UnitId unit = 0; unit < indices.size(); ++unit) {
      result.push_back(model.impl().choices(unit)[indices[unit]]);
    }
    return result;
  }

  GuardedMemory activations_, workspace_;
};

}  // namespace sluice::models::testing
