// Measures steps of an engine on a GPU in which nothing is computed: the client acquires the units of a model
// forward and backward, as PyTorch would, and adds gradients that are there already, so that what is left is
// to move and to update. A step is compared with what none could be quicker than: the time of its bytes on
// the link (copies alone, in the same run), that of the updates which the plan has the GPU make (all in its
// memory), or that of those which it has the CPU make, whichever is most.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <vector>

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "core/system.h"
#include "engine/machine/gpu_rates.h"
#include "engine/planner/planner.h"
#include "engine/steps/any_order_engine.h"

namespace sluice::engine {
namespace {

using allocator::DeviceRegion;
using allocator::Purpose;

constexpr int kWarmUp = 2;  // steps, after which a steady order maps nothing

struct Options {
  std::string model = "llama-3b", dtype = "bf16", state = "f32", master = "f32", optimizer = "adamw";
  std::string memory = "96GiB", device_memory = "16GiB";
  std::string updates = "auto";
  double cpu_memory = 0;  // bytes a second; 0: as measured
  std::size_t vocabulary = 0;
  int device = 0, steps = 3;
  bool clips = false, json = false;
};

struct Shape {
  const char* name;
  std::size_t layers, width, inner, keys, vocabulary;
};
constexpr Shape kShapes[] = {{"llama-1b", 16, 2048, 8192, 512, 32000},
                             {"llama-3b", 28, 3072, 8192, 1024, 32000},
                             {"llama-8b", 32, 4096, 14336, 1024, 32000},
                             {"tiny", 3, 256, 512, 64, 1024}};

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const Shape& shape : kShapes) names.emplace_back(shape.name);
  return names;
}

std::vector<UnitSpec> units_of(const Shape& shape, Dtype dtype) {
  std::vector<UnitSpec> units = {{"embedding", {{"embedding", {shape.vocabulary, shape.width}}}}};
  for (std::size_t i = 0; i < shape.layers; ++i) {
    UnitSpec unit{fmt::format("layers.{}", i), {}};
    const auto add = [&](const char* name, std::vector<std::size_t> sizes) {
      unit.parameters.push_back({fmt::format("{}.{}", unit.name, name), std::move(sizes)});
    };
    add("input_norm", {shape.width});
    for (const char* name : {"q", "o"}) add(name, {shape.width, shape.width});
    for (const char* name : {"k", "v"}) add(name, {shape.keys, shape.width});
    add("norm", {shape.width});
    for (const char* name : {"gate", "up"}) add(name, {shape.inner, shape.width});
    add("down", {shape.width, shape.inner});
    units.push_back(std::move(unit));
  }
  units.push_back({"head", {{"norm", {shape.width}}, {"head", {shape.vocabulary, shape.width}}}});
  for (UnitSpec& unit : units) unit.dtype = dtype;
  return units;
}

// An engine, and a client that has gradients at hand.
class Steps {
 public:
  Steps(Device& device, const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer)
      : device_(device),
        stream_(device.make_stream(false)),
        threads_(usable_cpus()),
        engine_(profile, plan, optimizer, resources(plan)),
        settings_({.groups = {{1e-4, 0.1}}, .clip = plan.clip ? 1.0 : 0.0}) {
    engine_.use_stream(stream_.get());
    std::size_t most = 0;
    for (ParameterId p = 0; p < layout().parameters(); ++p) most = std::max(most, bytes_of(p));
    gradient_ = DeviceRegion(client_ledger_, device, Purpose::kWorkspace, most);
    device.fill(stream_.get(), gradient_.address(), std::byte{0x3c}, most);  // small numbers in each type
    UnitSource source;
    source.values = [](ParameterId, std::size_t, std::span<float> out) { std::ranges::fill(out, 0.02f); };
    engine_.load_all(source);
  }
  ~Steps() {
    try {
      device_.synchronize(stream_.get());
    } catch (const Error&) {  // as above
    }
  }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // The seconds of each of so many steps, from the end of one to the end of the next.
  std::vector<double> seconds(int count) {
    for (int i = 0; i < kWarmUp; ++i) step();
    std::vector<double> found;
    for (auto begin = std::chrono::steady_clock::now(); count > 0; --count) {
      step();
      const auto end = std::chrono::steady_clock::now();
      found.push_back(std::chrono::duration<double>(end - begin).count());
      begin = end;
    }
    engine_.settle();
    return found;
  }

 private:
  // With exactly the memory that the plan states.
  Resources resources(const Plan& plan) {
    ledger_.set_budget(allocator::Tier::kHost, plan.peak_memory);
    ledger_.set_budget(allocator::Tier::kDevice, plan.device_bytes);
    Resources made{threads_, ledger_};
    made.device = &device_;
    return made;
  }
  const Layout& layout() const { return engine_.layout(); }
  std::size_t bytes_of(ParameterId p) const {
    const Layout::Location& location = layout().location(p);
    return location.elements * size_of(layout().dtype(location.unit));
  }
  void step() {
    const auto units = static_cast<UnitId>(layout().units().size());
    engine_.begin_step(settings_);
    for (UnitId unit = 0; unit < units; ++unit) {
      engine_.acquire(unit, Hold::kRead);
      engine_.release(unit);
    }
    for (UnitId unit = units; unit-- > 0;) {
      engine_.acquire(unit, Hold::kGradient);
      for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p)
        engine_.add_gradient(p, {reinterpret_cast<const void*>(gradient_.address()), layout().dtype(unit)});
      engine_.release(unit);
    }
    engine_.step(settings_);
  }

  Device& device_;
  Device::Stream stream_;  // outlives the engine
  Threads threads_;
  allocator::Ledger ledger_, client_ledger_;
  DeviceRegion gradient_;
  AnyOrderEngine engine_;
  StepSettings settings_;
};

void require_memory(std::uint64_t bytes) {
  const std::uint64_t available = memory_state().available;
  if (bytes > available)
    fail(ErrorCode::kBudget, "this measurement needs {} of memory, but {} are free: give a smaller --model",
         format_size(bytes), format_size(available));
}

Json measure(const Options& options) {
  Shape shape = *std::ranges::find(kShapes, options.model, &Shape::name);
  if (options.vocabulary > 0) shape.vocabulary = options.vocabulary;
  const Dtype dtype = dtype_from_name(options.dtype).value();
  const auto optimizer = optim::make_optimizer(
      {.name = options.optimizer,
       .storage = {optim::state_type_from_name(options.state).value(), options.master == "f32", 1}});
  const Profile profile = any_order_profile(units_of(shape, dtype), 1);
  Budget budget{parse_size(options.memory), 0, 0};
  budget.device = parse_size(options.device_memory);
  PlanRequest request;
  request.clip = options.clips;
  if (options.updates != "auto")
    request.updates = options.updates == "cpu" ? allocator::Tier::kHost : allocator::Tier::kDevice;
  const auto device = open_device(options.device);
  budget.device_base = device->measure_context();
  MachineRates rates;
  {
    Threads threads(usable_cpus());
    GpuWork work{*device, threads, *optimizer, dtype};
    work.device_bytes = std::min<std::uint64_t>(budget.device, device->free_memory() / 2);
    work.host_bytes = budget.memory;
    if (!measure_gpu(work, rates))
      fail(ErrorCode::kBudget,
           "{} of the GPU's memory and {} of the host's are too few to measure anything; "
           "give more --device-memory, or more --memory",
           options.device_memory, options.memory);
  }
  if (options.cpu_memory > 0) rates.memory_bandwidth = options.cpu_memory;
  const Plan plan = make_plan(profile, *optimizer, budget, request, rates);
  require_memory(plan.peak_memory);
  const double link_seconds = copy_seconds(plan.step_bytes_in, plan.step_bytes_out, rates.gpu);
  std::size_t elements = 0, by_gpu = 0;
  for (std::size_t u = 0; u < profile.units.size(); ++u)
    for (const ParameterSpec& parameter : profile.units[u].parameters) {
      elements += parameter.elements();
      if (!plan.units[u].updated_by_cpu()) by_gpu += parameter.elements();
    }
  const double update = static_cast<double>(by_gpu) * rates.gpu.update_seconds;
  std::vector<double> steps = Steps(*device, profile, plan, *optimizer).seconds(options.steps);
  std::ranges::sort(steps);
  const double seconds = steps[steps.size() / 2];
  const double limit = std::max({link_seconds, update, plan.device_time.cpu_updates});
  return {{"bench", "gpu_step"},
          {"gpu", device->info().name},
          {"cuda_of_driver", device->info().driver},
          {"model", options.model},
          {"parameters", elements},
          {"updated_by_gpu", by_gpu},
          {"optimizer", optimizer->name()},
          {"dtype", options.dtype},
          {"state", options.state},
          {"master", options.master},
          {"updates", options.clips ? "at the end of the step" : "in backward"},
          {"device_memory", budget.device},
          {"device_bytes", plan.device_bytes},
          {"host_bytes", plan.peak_memory},
          {"bytes_in", plan.step_bytes_in},
          {"bytes_out", plan.step_bytes_out},
          {"link", {{"in", rates.gpu.in}, {"out", rates.gpu.out}, {"both", rates.gpu.both}}},
          {"updated_by", plan.updates_because},
          {"cpu_memory", rates.memory_bandwidth},
          {"cpu_update_seconds", plan.device_time.cpu_updates},
          {"link_seconds", link_seconds},
          {"update_seconds", update},
          {"seconds", seconds},
          {"limit", limit},
          {"ratio", seconds / limit}};
}

std::string text_of(const Json& found) {
  const auto number = [&](const char* name) { return found.at(name).get<double>(); };
  const auto size = [&](const char* name) { return format_size(found.at(name).get<std::uint64_t>()); };
  const auto rate = [&](const char* name) { return found.at("link").at(name).get<double>() / 1e9; };
  return fmt::format(
      "{} of {:.2f}G parameters on {}: {} on the GPU, {} in memory\n"
      "a step takes {} in and {} out, {:.4f} s at the link's {:.1f}, {:.1f} and both ways {:.1f} GB/s\n"
      "the updates of {:.2f}G parameters take {:.4f} s on the GPU, and those of the others {:.4f} s on the "
      "CPU, in memory of {:.1f} GB/s\n"
      "a step took {:.4f} s, {:.2f} times the largest of these\n",
      found.at("model").get<std::string>(), number("parameters") / 1e9, found.at("gpu").get<std::string>(),
      size("device_bytes"), size("host_bytes"), size("bytes_in"), size("bytes_out"), number("link_seconds"),
      rate("in"), rate("out"), rate("both"), number("updated_by_gpu") / 1e9, number("update_seconds"),
      number("cpu_update_seconds"), number("cpu_memory") / 1e9, number("seconds"), number("ratio"));
}

void bind(CLI::App& app, Options& options) {
  const auto choice = [&](const char* name, std::string& value, std::vector<std::string> names,
                          const char* help) {
    app.add_option(name, value, help)->check(CLI::IsMember(std::move(names)))->capture_default_str();
  };
  choice("--model", options.model, shape_names(), "whose units are moved");
  choice("--dtype", options.dtype, {"f32", "bf16", "f16"}, "type of parameters and gradients");
  choice("--state", options.state, optim::state_type_names(), "type of the optimizer's state");
  choice("--master", options.master, {"f32", "none"}, "whether narrower parameters have f32 masters");
  choice("--updates", options.updates, {"auto", "cpu", "gpu"}, "what updates; auto: as the plan finds best");
  choice("--optimizer", options.optimizer, {"adamw", "adam", "lion", "sgd"}, "what updates");
  app.add_option("--cpu-memory", options.cpu_memory,
                 "bytes a second of the CPU's memory by which the plan is made (as measured)");
  app.add_option("--vocabulary", options.vocabulary, "rows of embedding and head (the model's)");
  app.add_option("--memory", options.memory, "of the host")->capture_default_str();
  app.add_option("--device-memory", options.device_memory, "of the GPU")->capture_default_str();
  app.add_option("--device", options.device, "which GPU")->capture_default_str();
  app.add_option("--steps", options.steps, "how many are measured, of which the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_flag("--clip", options.clips, "updates wait for the norm of all gradients");
  app.add_flag("--json", options.json, "print JSON");
}

}  // namespace
}  // namespace sluice::engine

int main(int count, char** arguments) {
  CLI::App app("Measures steps of an engine on a GPU that only move and update");
  sluice::engine::Options options;
  sluice::engine::bind(app, options);
  CLI11_PARSE(app, count, arguments);
  try {
    const sluice::Json found = sluice::engine::measure(options);
    fmt::print("{}", options.json ? found.dump(2) + "\n" : sluice::engine::text_of(found));
  } catch (const sluice::Error& error) {
    fmt::print(stderr, "gpu_step_bench: {}\n", error.what());
    return sluice::exit_status(error.code());
  }
}
