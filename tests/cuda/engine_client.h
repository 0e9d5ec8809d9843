#pragma once
#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "cuda/hands.h"
#include "cuda/kernel_test.h"
#include "engine/planner/planner.h"
#include "engine/ranks/call_id.h"
#include "engine/saved_values.h"
#include "engine/steps/any_order_engine.h"
#include "offload/test_files.h"

// A model that an engine trains on the CPU or on a GPU, by the same client. A parameter's gradient is the
// parameter itself and noise, so that any bytes that came too late, or left too early, show in what follows.
namespace sluice::engine::twins {

inline optim::OptimizerSettings optimizer_of(const char* name, Dtype state, bool master) {
  return {name, Json::object(), {state, master, 11}};
}

struct Case {
  optim::OptimizerSettings optimizer = {};
  Dtype dtype = Dtype::kF32;
  bool clip = true;
  std::array<std::optional<allocator::Tier>, kParts> places = {};  // of parameters, gradients and state
  std::optional<allocator::Tier> updates = {};                     // what updates where a GPU computes
  kernels::F32Products* products = nullptr;  // null: the matrix library's, where they are needed
  Threads::Team team = nullptr;              // of the engine's threads
  std::size_t memory = kGiB;
  std::size_t device = 128 * kMiB;  // the budget of a GPU's memory
  std::size_t blocks = 3, micro_batches = 1, prefetch = 1;
  std::size_t rows = 132;             // of a block; 132 are too many for it to be packed
  bool edits = false, keeps = false;  // the client edits parameters, and keeps gradients over steps
  bool parts = false;                 // it reads no gradients, of which ranks have parts
  bool each_backward = false;         // ranks sum gradients in each backward pass
  bool measures = false;  // the client measures and multiplies gradients before the step, as clipping does
  bool looks = false;     // the client also reads parameters between the last gradient and the step
  bool holds = false;     // the client holds the first block from its forward pass to its backward pass
  // The client says where gradients and micro-batches end. Ranks then differ in the order of units, and lack
  // some.
  bool ends = false;
  // Backward goes over the units in the order of forward, so that nothing of a unit is still there when it
  // comes again, where there are more units than frames for them.
  bool cycles = false;
  bool once = false;                        // each parameter has one gradient in a step, of its own type
  bool leaves = false;                      // the engine ends in the middle of a step, and nothing is saved
  std::optional<ParameterId> spoiled = {};  // whose gradient is NaN in the second step
  bool abandons = false;                    // the client abandons that step
  int steps = 2;
  double norm = 0.5;
  unsigned disk_microseconds = 0;  // that each transfer of the disk takes
  double disk_read_errors = 0;     // how many of the disk's reads fail
  MachineRates rates = {};         // for which the plan is made
  RankOf ranks = {};               // the rank that it is for
  comm::Nccl* nccl = nullptr;      // of a plan whose ranks use it; null: they are joined with the engine
  std::size_t stage = 0;
  std::vector<UnitId> shards_in_memory = {};  // although others that are planned like them are on disk
};

inline constexpr std::size_t kWidth = 1000;

inline Profile profile_of(const Case& setup) {
  std::vector<UnitSpec> units = {{"first", {{"scale", {70}}, {"shift", {1030}}}}};
  for (std::size_t i = 0; i < setup.blocks; ++i) {
    const std::string name = "block." + std::to_string(i);
    units.push_back({name,
                     {{name + ".weight", {i == 1 ? 4 * setup.rows : setup.rows + i, kWidth}},
                      {name + ".bias", {kWidth}, 1}}});
  }
  units.push_back({"frozen", {{"table", {std::min<std::size_t>(setup.rows, 1040), kWidth}}}});
  units.back().trainable = false;
  for (UnitSpec& unit : units) unit.dtype = setup.dtype;
  Profile profile = any_order_profile(std::move(units), setup.holds ? 2 : 1);
  if (setup.cycles) {
    const auto backward = profile.schedule.begin() + static_cast<std::ptrdiff_t>(profile.units.size());
    std::reverse(backward, profile.schedule.end());
    profile.schedule.pop_back();  // the frozen unit has none
  }
  profile.ends_micro_batches = setup.ends;
  if (setup.ends) profile.micro_batches = setup.micro_batches;
  return profile;
}

inline PlanRequest request_of(const Case& setup) {
  PlanRequest request;
  request.ranks = setup.ranks;
  request.stage = setup.stage;
  request.clip = setup.clip;
  request.sums_each_backward = setup.each_backward;
  request.prefetch = setup.prefetch;
  request.chunk_elements = kChunkGrain;
  request.places = setup.places;
  request.updates = setup.updates;
  return request;
}

inline Budget budget_of(const Case& setup) { return {setup.memory, kGiB, 0, setup.device}; }

inline Plan plan_of(const Case& setup) {
  return make_plan(profile_of(setup), *optim::make_optimizer(setup.optimizer), budget_of(setup),
                   request_of(setup), setup.rates);
}

// The same training where the CPU computes, with everything in memory.
inline Case on_the_cpu(Case setup) {
  setup.device = 0, setup.memory = kGiB;
  setup.places = {}, setup.updates = {};
  setup.ranks.gpus_meet = setup.ranks.by_nccl = false;
  return setup;
}

struct Outcome : SavedValues {
  std::vector<std::byte> seen;  // the parameters as the client saw them
  std::vector<double> norms;
  bool operator==(const Outcome&) const = default;
};

// An engine with exactly the memory that its plan states.
inline std::unique_ptr<comm::Nccl> joined_by_nccl(comm::Communicator& communicator, Device& device) {
  std::string problem;
  auto nccl = comm::Nccl::join(communicator, call_id("NCCL"), device, {}, problem);
  EXPECT_EQ(problem, "");
  return nccl;
}

struct Made {
  // device: null where the CPU computes.
  Made(const Case& given, Device* device, comm::Communicator* communicator = nullptr)
      : setup(device == nullptr ? on_the_cpu(given) : given),
        profile(profile_of(setup)),
        optimizer(optim::make_optimizer(setup.optimizer)),
        plan(plan_of(setup)),
        threads(2, setup.team) {
    for (const UnitId unit : setup.shards_in_memory) {
      plan.units[unit].shard_on_disk = false;
      plan.peak_memory += kHugePage + Layout(profile.units).unit_bytes(unit);
    }
    ledger.set_budget(allocator::Tier::kHost, plan.peak_memory);
    ledger.set_budget(allocator::Tier::kDevice, plan.device_bytes);
    Resources resources{threads, ledger};
    const offload::Faults faults{.read_error = setup.disk_read_errors,
                                 .delay_microseconds = setup.disk_microseconds};
    disk.emplace(offload::alone(offload::make_faulty_file(*file, faults)), ledger);
    if (plan.uses_disk()) resources.disk = &*disk;
    resources.device = device;
    resources.communicator = communicator;
    if (plan.ranks.by_nccl && setup.nccl == nullptr) nccl = joined_by_nccl(*communicator, *device);
    resources.nccl = setup.nccl != nullptr ? setup.nccl : nccl.get();
    if (setup.optimizer.name == "muon") products = kernels::load_matrix_library(2);
    resources.products = setup.products != nullptr ? setup.products : products.get();
    engine = std::make_unique<AnyOrderEngine>(profile, plan, *optimizer, resources);
  }
  Case setup;
  Profile profile;
  std::unique_ptr<optim::Optimizer> optimizer;
  Plan plan;
  Threads threads;
  allocator::Ledger ledger;
  const std::unique_ptr<offload::File> file = offload::make_memory_file("disk");
  std::optional<offload::RecordStore> disk;
  std::unique_ptr<kernels::F32Products> products;
  std::unique_ptr<comm::Nccl> nccl;
  std::unique_ptr<AnyOrderEngine> engine;
};

class Client {
 public:
  Client(const Case& setup, AnyOrderEngine& engine, Hands& hands)
      : setup_(setup), engine_(engine), layout_(engine.layout()), hands_(hands) {}

  void load() {
    UnitSource source;
    source.values = [this](ParameterId p, std::size_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = noise(p, first + i, 0);
    };
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit) engine_.load(unit, source);
  }

  double step(int step) {
    StepSettings settings{.groups = {{0.02 / (step + 1), 0.1}, {0.02, 0}},
                          .clip = setup_.clip ? setup_.norm : 0};
    engine_.begin_step(settings);
    spoils_ = step == 1;
    refused_ = false;
    const std::size_t passes = setup_.clip ? setup_.micro_batches : 1;
    for (std::size_t pass = 0; pass < passes; ++pass) {
      forward();
      for (const UnitId unit : units_of_backward(step, pass)) {
        backward(unit);
        if (after_backward && pass + 1 == passes) after_backward(unit);
      }
      if (setup_.ends) engine_.end_micro_batch();
    }
    if (setup_.looks) forward();
    settings.keep_gradients = setup_.keeps && step % 2 == 0;
    if (setup_.edits && !setup_.parts) look_at_gradients();
    if (setup_.measures) measure_gradients();
    if (spoils_ && setup_.abandons) {
      engine_.abandon_step();
      return -1;
    }
    double norm = 0;
    refusing([&] { norm = engine_.step(settings).gradient_norm; });
    if (setup_.edits) edit(step);
    return refused_ ? -1 : norm;
  }

  Outcome save() {
    Outcome outcome;
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
      engine_.save(unit, sink_of(outcome, layout_));
    outcome.seen = hands_.seen();
    return outcome;
  }

  std::size_t bytes(ParameterId p) const {
    return layout_.location(p).elements * size_of(layout_.dtype(layout_.location(p).unit));
  }

  std::function<void(UnitId)> after_backward;  // of the unit, in the last micro-batch

  // Part of a step, with which the GPU is not done when this returns.
  void begin_one() {
    engine_.begin_step({});
    for (UnitId unit = 0; unit < layout_.units().size() / 2; ++unit) {
      engine_.acquire(unit, Hold::kRead);
      engine_.release(unit);
    }
  }

 private:
  // A gradient that is not finite is refused, once.
  void refusing(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      if (!setup_.spoiled || refused_ || error.code() != ErrorCode::kNotFinite) throw;
      EXPECT_NE(std::string(error.what()).find("'" + layout_.spec(*setup_.spoiled).name + "'"),
                std::string::npos)
          << error.what();
      refused_ = true;
    }
  }
  void forward() {
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
      engine_.acquire(unit, Hold::kRead);
      for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
        hands_.look(engine_.parameter(p), bytes(p));
      if (!setup_.holds || unit != kHeld) engine_.release(unit);
    }
  }
  void measure_gradients() {
    double squares = 0;
    for (ParameterId p = 0; p < layout_.parameters(); ++p)
      if (engine_.has_gradient(p)) squares += std::pow(engine_.gradient_norm(p), 2);
    for (ParameterId p = 0; p < layout_.parameters(); ++p)
      if (engine_.has_gradient(p)) engine_.multiply_gradient(p, 1 / (1 + squares));
  }
  void look_at_gradients() {
    for (ParameterId p = 0; p < layout_.parameters(); ++p) {
      if (!engine_.has_gradient(p)) continue;
      if (p % 3 == 0) engine_.multiply_gradient(p, 0.75);
      const std::size_t bytes = layout_.location(p).elements * sizeof(float);
      const Array room = hands_.room(bytes, Dtype::kF32);
      engine_.read_gradient(p, room);
      hands_.look(room, bytes);
      if (p % 4 == 1) engine_.drop_gradient(p);
    }
  }
  void edit(int step) {
    const auto unit = static_cast<UnitId>(static_cast<std::size_t>(step) % layout_.units().size());
    engine_.acquire(unit, Hold::kEdit);
    const ParameterId p = layout_.first_parameter(unit);
    hands_.overwrite(engine_.parameter(p), bytes(p));
    engine_.release(unit);
  }
  void backward(UnitId unit) {
    if (!layout_.trainable(unit)) return;
    engine_.acquire(unit, Hold::kGradient);
    for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
      engine_.add_gradient(p, hands_.copy_of(engine_.parameter(p), bytes(p)));
      if (!setup_.once)
        engine_.add_gradient(p, hands_.noise_of(noise_of_rank(p), layout_.location(p).elements));
      if (spoils_ && setup_.spoiled == p) engine_.add_gradient(p, hands_.nan(layout_.location(p).elements));
    }
    const bool early = unit % 2 == 0;
    if (setup_.ends && early) engine_.end_gradients(unit);
    refusing([&] { engine_.release(unit); });
    if (setup_.ends && !early) engine_.end_gradients(unit);
    if (setup_.holds && unit == kHeld) engine_.release(unit);
  }

  // The reverse of the order of forward. Where micro-batches end, and there are enough units, ranks come to
  // two units in turn, as the step says, and in some steps one of them lacks another.
  std::vector<UnitId> units_of_backward(int step, std::size_t pass) const {
    std::vector<UnitId> units(layout_.units().size());
    std::iota(units.rbegin(), units.rend(), UnitId{0});
    if (setup_.cycles) {
      std::ranges::reverse(units);
      return units;
    }
    if (!setup_.ends || units.size() < 5) return units;
    if ((step + setup_.ranks.rank) % 2 == 0) std::swap(units[2], units[3]);
    const bool lacks = setup_.ranks.rank == 0 && pass + 1 == setup_.micro_batches;
    if (lacks && step == 2) std::erase(units, units[1]);
    if (lacks && step == 3) std::erase(units, units[4]);
    return units;
  }

  // Each rank has gradients of its own.
  ParameterId noise_of_rank(ParameterId p) const {
    return p + static_cast<ParameterId>(setup_.ranks.rank) * 1000;
  }

  static constexpr UnitId kHeld = 1;
  bool spoils_ = false, refused_ = false;
  const Case setup_;
  AnyOrderEngine& engine_;
  const Layout& layout_;
  Hands& hands_;
};

inline Outcome trained(const Case& setup, Client& client) {
  client.load();
  std::vector<double> norms;
  for (int step = 0; step < setup.steps; ++step) norms.push_back(client.step(step));
  Outcome outcome;
  if (setup.leaves)
    client.begin_one();
  else
    outcome = client.save();
  outcome.norms = norms;
  return outcome;
}

inline Outcome train_on_cpu(const Case& setup, comm::Communicator* communicator = nullptr) {
  Made made(setup, nullptr, communicator);
  HandsOnCpu hands;
  Client client(setup, *made.engine, hands);
  return trained(setup, client);
}

// An engine on a GPU, and a client with a stream of its own, which makes at most setup.steps steps. The
// engine ends before the client's memory, with which it might still have work, and before the stream.
struct OnGpu {
  OnGpu(const Case& setup, Device& device, comm::Communicator* communicator = nullptr)
      : stream(device.make_stream(false)),
        hands(device, stream.get(), bytes_seen(setup), most_bytes(setup)),
        made(setup, &device, communicator),
        engine(*made.engine),
        client(setup, engine, hands) {
    engine.use_stream(stream.get());
  }
  const Device::Stream stream;
  HandsOnGpu hands;
  Made made;
  AnyOrderEngine& engine;
  Client client;

  // Returns the bytes that the client itself copies in a step of one micro-batch.
  std::uint64_t own_bytes() const {
    std::uint64_t bytes = 0;
    for (UnitId unit = 0; unit < engine.layout().units().size(); ++unit)
      bytes += 2 * engine.layout().unit_bytes(unit);
    return bytes;
  }

 private:
  template <class Each>
  static void for_each_size(const Case& setup, const Each& each) {
    const Layout layout(profile_of(setup).units);
    for (ParameterId p = 0; p < layout.parameters(); ++p) each(layout.location(p).elements * sizeof(float));
  }
  static std::size_t bytes_seen(const Case& setup) {
    std::size_t all = 0;
    for_each_size(setup, [&](std::size_t bytes) { all += bytes; });
    return 2 * all * (setup.micro_batches + 1) * static_cast<std::size_t>(setup.steps);
  }
  static std::size_t most_bytes(const Case& setup) {
    std::size_t most = 0;
    for_each_size(setup, [&](std::size_t bytes) { most = std::max(most, bytes); });
    return round_up(most, kHugePage);
  }
};

// Calls look(made) with the engine when the training has ended.
template <class Look>
Outcome train_on_gpu(const Case& setup, Device& device, const Look& look,
                     comm::Communicator* communicator = nullptr) {
  OnGpu gpu(setup, device, communicator);
  const Outcome outcome = trained(setup, gpu.client);
  look(gpu.made);
  return outcome;
}

}  // namespace sluice::engine::twins
