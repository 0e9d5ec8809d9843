#include "optim/device_update.h"

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "cuda/kernel_test.h"
#include "optim/eight_bit.h"
#include "thrown.h"

// Updates on a GPU have the bits of those on the CPU.
namespace sluice::optim::update_test {

using Bytes = std::vector<std::byte>;

// The arrays that an update reads and writes, in the host's memory.
struct Values {
  std::size_t count;
  std::uint64_t first_index;
  Dtype parameter_type, gradient_type;
  bool has_master, has_copy;
  Bytes gradient, master, parameter;
  struct State {
    Dtype type;
    Bytes values, scales;
  };
  std::vector<State> state;

  // The arrays that change.
  std::vector<std::pair<Bytes, Dtype>> changing() const {
    std::vector<std::pair<Bytes, Dtype>> all{{master, Dtype::kF32}, {parameter, parameter_type}};
    for (const State& part : state) {
      all.emplace_back(part.values, part.type);
      all.emplace_back(part.scales, Dtype::kF32);
    }
    return all;
  }
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : words_(seed) {}
  // Over many powers of ten, with zeros of both signs, subnormal numbers, and, now and then, others.
  float value(bool is_square, bool may_be_special) {
    const std::uint64_t word = words_();
    if (word % 61 == 0) return is_square ? 0.0f : -0.0f;
    if (word % 67 == 0) return 0x1p-140f;
    if (may_be_special && word % 701 == 0) return std::numeric_limits<float>::infinity();
    if (may_be_special && word % 709 == 0) return std::numeric_limits<float>::quiet_NaN();
    std::normal_distribution<float> normal;
    const float number = normal(words_) * std::pow(10.0f, normal(words_));
    return is_square ? number * number * 1e-3f : number;
  }
  std::uint64_t word() { return words_(); }

 private:
  std::mt19937_64 words_;
};

// The bytes with one NaN for all, since those of a GPU have other bits.
Bytes with_one_nan(Bytes bytes, Dtype type) {
  for (std::size_t i = 0; is_float(type) && i < bytes.size() / size_of(type); ++i) {
    const std::byte* const at = bytes.data() + i * size_of(type);
    float value = 0;
    Bf16 bf16{};
    F16 f16{};
    if (type == Dtype::kF32) std::memcpy(&value, at, sizeof value);
    if (type == Dtype::kBf16) std::memcpy(&bf16, at, sizeof bf16), value = to_f32(bf16);
    if (type == Dtype::kF16) std::memcpy(&f16, at, sizeof f16), value = to_f32(f16);
    if (std::isnan(value)) put(bytes, i, type, std::numeric_limits<float>::quiet_NaN());
  }
  return bytes;
}

Values make_values(const Optimizer& optimizer, std::size_t count, std::uint64_t first_index, Dtype parameter,
                   Dtype gradient, bool may_be_special, std::uint64_t seed) {
  Random random(seed);
  Values v;
  v.count = count, v.first_index = first_index, v.parameter_type = parameter, v.gradient_type = gradient;
  v.has_master = parameter == Dtype::kF32 || optimizer.keeps_master();
  v.has_copy = parameter != Dtype::kF32;
  v.gradient.resize(count * size_of(gradient));
  v.master.resize(v.has_master ? 4 * count : 0);
  v.parameter.resize(v.has_copy ? count * size_of(parameter) : 0);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = random.value(false, false);
    put(v.gradient, i, gradient, random.value(false, may_be_special));
    if (v.has_master) put(v.master, i, Dtype::kF32, value);
    if (v.has_copy) put(v.parameter, i, parameter, value);
  }
  for (const StateArray& array : optimizer.state()) {
    Values::State state;
    state.type = array.type;
    state.values.resize(count * size_of(array.type));
    std::vector<float> scales(array.type == Dtype::kU8 ? divide_up(count, kScaleBlock) : 0);
    const bool is_square = array.map == CodeMap::kUnsigned;
    for (std::size_t i = 0; i < count; ++i)
      array.type == Dtype::kU8 ? void(state.values[i] = static_cast<std::byte>(random.word()))  // all codes
                               : put(state.values, i, array.type, random.value(is_square, false));
    for (float& scale : scales)
      scale = is_square ? std::abs(random.value(true, false)) : random.value(false, false);
    state.scales.resize(4 * scales.size());
    std::copy_n(reinterpret_cast<const std::byte*>(scales.data()), state.scales.size(), state.scales.data());
    v.state.push_back(std::move(state));
  }
  return v;
}

// A span over the values, each array of which is at place(bytes, size of an element).
template <class Place>
Span span_of(Values& v, Place place) {
  Span span;
  span.count = v.count, span.first_index = v.first_index, span.parameter_index = 3;
  span.gradient = {place(v.gradient, size_of(v.gradient_type)), v.gradient_type};
  if (v.has_master) span.master = static_cast<float*>(place(v.master, 4));
  if (v.has_copy) span.parameter = {place(v.parameter, size_of(v.parameter_type)), v.parameter_type};
  for (Values::State& state : v.state) {
    StatePart part;
    part.values = {place(state.values, size_of(state.type)), state.type};
    if (!state.scales.empty()) part.scales = static_cast<float*>(place(state.scales, 4));
    span.state.push_back(part);
  }
  return span;
}

// The GPU's copy of values, each array of which begins at least `shift` bytes beyond a multiple of 256.
class OnGpu {
 public:
  OnGpu(Device& device, Values& v, std::size_t shift)
      : device_(device),
        memory_(ledger_, device, allocator::Purpose::kParameter, room(v)),
        host_(device, room(v)) {
    const auto place = [&](Bytes& bytes, std::size_t element) {
      const std::size_t at = round_up(round_up(end_, 256) + shift, element);
      end_ = at + bytes.size();
      places_.emplace_back(&bytes, at);
      std::copy(bytes.begin(), bytes.end(), host_.data() + at);
      return reinterpret_cast<void*>(memory_.address() + at);
    };
    span_ = span_of(v, place);
    device_.copy_in(stream_.get(), memory_.address(), host_.data(), end_);
  }
  ~OnGpu() {
    at_the_end([&] { device_.synchronize(stream_.get()); });
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  const Span& span() const { return span_; }
  CUstream_st* stream() const { return stream_.get(); }
  void read() {
    device_.copy_out(stream_.get(), host_.data(), memory_.address(), end_);
    device_.synchronize(stream_.get());
    for (const auto& [bytes, at] : places_)
      std::copy(host_.data() + at, host_.data() + at + bytes->size(), bytes->begin());
  }

 private:
  static std::size_t room(const Values& v) {
    std::size_t bytes = v.gradient.size() + 4 * kKiB;
    for (const auto& [array, type] : v.changing()) bytes += array.size();
    return round_up(bytes, kHugePage);
  }

  Device& device_;
  allocator::Ledger ledger_;
  allocator::DeviceRegion memory_;
  HostMemory host_;
  Device::Stream stream_ = device_.make_stream(false);
  std::vector<std::pair<Bytes*, std::size_t>> places_;
  std::size_t end_ = 0;
  Span span_;
};

struct Case {
  std::string optimizer;
  Json settings;
  Dtype state, parameter, gradient;
  bool master;
};
struct Part {
  std::size_t count, shift;
  std::uint64_t first_index;
  double clip_value;
  bool may_be_special;
};

class UpdateTest : public KernelTest {
 protected:
  void expect_same_bits(const Case& c, const Part& part, std::uint64_t seed) {
    const auto optimizer = make_optimizer({c.optimizer, c.settings, {c.state, c.master, 11}});
    const auto values = [&] {
      return make_values(*optimizer, part.count, part.first_index, c.parameter, c.gradient,
                         part.may_be_special, seed);
    };
    Values on_cpu = values(), on_gpu = values();
    const Span span =
        span_of(on_cpu, [](Bytes& bytes, std::size_t) { return static_cast<void*>(bytes.data()); });
    OnGpu gpu(*device_, on_gpu, part.shift);
    DeviceUpdate update(*device_, *optimizer);
    for (std::uint64_t step = 1; step <= 2; ++step) {
      const Hyperparameters h = {.learning_rate = 1e-2,
                                 .weight_decay = 0.1,
                                 .gradient_factor = 0.7,
                                 .step = step,
                                 .clip_value = part.clip_value};
      optimizer->apply(threads_, h, span);
      const DeviceUpdate::Part on_the_gpu{h, gpu.span()};
      update.apply(gpu.stream(), {&on_the_gpu, 1});
    }
    gpu.read();
    const auto expected = on_cpu.changing(), found = on_gpu.changing();
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(with_one_nan(found[i].first, found[i].second) ==
                  with_one_nan(expected[i].first, expected[i].second))
          << c.optimizer << " array " << i << ", state " << name_of(c.state) << ", parameter "
          << name_of(c.parameter) << ", gradient " << name_of(c.gradient)
          << (c.master ? ", master" : ", rounded") << ", " << part.count << " elements";
  }
  Threads threads_{2};
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::vector<std::pair<std::string, Json>> optimizers = {
      {"adamw", Json::object()},
      {"adam", Json::object()},
      {"lion", Json::object()},
      {"sgd", {{"momentum", 0.9}}},
      {"sgd", {{"momentum", 0.9}, {"nesterov", true}}},
      {"sgd", {{"momentum", 0.0}}}};
  for (const auto& [name, settings] : optimizers)
    for (const Dtype state : {Dtype::kF32, Dtype::kBf16, Dtype::kU8})
      for (const Dtype parameter : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
        for (const bool master : {true, false}) {
          if (state != Dtype::kF32 && settings.value("momentum", 1.0) == 0) continue;  // it has no state
          if (!master && parameter != Dtype::kBf16) continue;
          const Dtype gradient = cases.size() % 3 == 0 ? Dtype::kF32 : parameter;
          cases.push_back({name, settings, state, parameter, gradient, master});
        }
  return cases;
}

TEST_F(UpdateTest, EachOptimizerHasTheBitsOfTheCpu) {
  std::uint64_t seed = 0;
  for (const Case& c : all_cases()) {
    expect_same_bits(c, {3000, 0, 0, 0, false}, ++seed);
    expect_same_bits(c, {700, 4, 512, 0.01, true}, ++seed);  // no array is aligned, and the end is in a block
  }
}

TEST_F(UpdateTest, SmallSpansHaveThemToo) {
  const Case c = {"adamw", Json::object(), Dtype::kU8, Dtype::kBf16, Dtype::kBf16, false};
  for (const std::size_t count : {1, 7, 8, 9, 255, 256, 257, 2048, 2049})
    expect_same_bits(c, {count, 0, 256, 0, false}, count);
}

// Spans of state that is not in codes may begin anywhere.
TEST_F(UpdateTest, SpansThatBeginAnywhereHaveThem) {
  const Case c = {"adamw", Json::object(), Dtype::kBf16, Dtype::kBf16, Dtype::kF16, true};
  for (const std::uint64_t first : {1, 13, 100000000}) expect_same_bits(c, {500, 2, first, 0, false}, first);
}

// These parameters have groups and numbers of updates of their own, in more than one launch.
TEST_F(UpdateTest, SpansThatGoTogetherHaveThem) {
  const std::vector<Case> cases = {{"adamw", Json::object(), Dtype::kF32, Dtype::kBf16, Dtype::kBf16, true},
                                   {"adamw", Json::object(), Dtype::kU8, Dtype::kBf16, Dtype::kF32, false},
                                   {"sgd", {{"momentum", 0.0}}, Dtype::kF32, Dtype::kF32, Dtype::kF32, true}};
  const std::size_t spans = DeviceUpdate::kMostTogether + 3;
  for (const Case& c : cases) {
    const auto optimizer = make_optimizer({c.optimizer, c.settings, {c.state, c.master, 11}});
    std::vector<Values> on_cpu, on_gpu;
    for (std::size_t i = 0; i < spans; ++i) {  // up to four blocks of threads
      on_cpu.push_back(make_values(*optimizer, 1 + 257 * i, 256 * i, c.parameter, c.gradient, false, i));
      on_gpu.push_back(on_cpu.back());
    }
    std::vector<std::unique_ptr<OnGpu>> gpus;
    std::vector<DeviceUpdate::Part> parts;
    for (std::size_t i = 0; i < spans; ++i) {
      gpus.push_back(std::make_unique<OnGpu>(*device_, on_gpu[i], i % 3 == 0 ? 4 : 0));
      device_->synchronize(gpus.back()->stream());
      Hyperparameters h{.learning_rate = 1e-2 / static_cast<double>(1 + i % 4),
                        .weight_decay = i % 2 == 0 ? 0.1 : 0,
                        .gradient_factor = 1 / static_cast<double>(1 + i % 3),
                        .step = 1 + i,
                        .clip_value = i % 5 == 0 ? 0.01 : 0};
      parts.push_back({h, gpus.back()->span()});
      optimizer->apply(threads_, h,
                       span_of(on_cpu[i], [](Bytes& bytes, std::size_t) -> void* { return bytes.data(); }));
    }
    const auto launches = [] { return fake() == nullptr ? 0 : fake()->counts().calls["cuLaunchKernel"]; };
    const std::uint64_t before = launches();
    DeviceUpdate(*device_, *optimizer).apply(gpus.front()->stream(), parts);
    EXPECT_EQ(launches() - before, fake() == nullptr ? 0 : 2);
    device_->synchronize(gpus.front()->stream());
    for (std::size_t i = 0; i < spans; ++i) {
      gpus[i]->read();
      EXPECT_TRUE(on_gpu[i].changing() == on_cpu[i].changing()) << c.optimizer << " span " << i;
    }
  }
}

TEST_F(UpdateTest, WhatNeedsWholeParametersIsTheCpus) {
  for (const char* name : {"adafactor", "muon"}) {
    const auto optimizer = make_optimizer({name});
    expect_error(ErrorCode::kInvalidArgument, {name, "as a whole", "CPU"},
                 [&] { DeviceUpdate(*device_, *optimizer); });
  }
}

TEST_F(UpdateTest, KernelsAreFoundByTheirNames) {
  EXPECT_NE(device_->kernel("sluice_adam_plain_master"), nullptr);
  expect_error(ErrorCode::kInternal, {"no kernel sluice_nothing"},
               [&] { device_->kernel("sluice_nothing"); });
}

}  // namespace sluice::optim::update_test
