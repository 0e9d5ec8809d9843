#pragma once
#include "comm/worlds.h"
#include "engine/memory/stored_shards.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"
#include "engine/toy.h"
#include "offload/records.h"
#include "offload/test_files.h"
#include "testing.h"

// Ranks that train the model of toy.h by its schedule, each a thread here.
namespace sluice::engine::scheduled {

// The settings on which the bits may depend, and the group, on which they do not.
struct Case {
  optim::OptimizerSettings optimizer = {};
  Dtype dtype = Dtype::kF32;
  double clip = 0;
  std::optional<std::size_t> group = 4;
  std::size_t micro_batches = 4;  // of a rank
  bool reproducible = false;
  std::size_t blocks = 2;
  // By step: the factor of the loss, where it has one. A step in which a gradient overflows is skipped.
  std::vector<double> scales = {};
  // Ranks of even numbers write the left columns of each matrix's gradient, and those of odd numbers the
  // others and the vectors'. What is there beside that does not count.
  bool in_parts = false;
};
inline void PrintTo(const Case& c, std::ostream* to) {
  *to << c.optimizer.name << " with state of " << name_of(c.optimizer.storage.state)
      << (c.optimizer.storage.master ? "" : " without masters") << ", " << name_of(c.dtype) << ", clip "
      << c.clip << ", " << c.micro_batches << " micro-batches in groups of "
      << (c.group ? std::to_string(*c.group) : "any size") << (c.reproducible ? ", reproducible" : "")
      << (c.scales.empty() ? "" : ", scaled");
}

// The settings on which the bits do not depend.
struct Where {
  std::optional<std::size_t> stage = 3;
  decltype(PlanRequest::places) places = toy::places("disk");
  std::size_t pieces = StoredShards::kFewestPieces;  // at most
  offload::Faults faults = {};                       // of rank 1
  std::vector<std::size_t> stages = {};              // of each unit, where they differ
  std::uint64_t memory = kGiB, disk = kGiB;
};

struct Ran {
  toy::Outcome outcome;                            // of rank 0
  std::uint64_t read = 0, planned_read_apart = 0;  // in the last step
  std::uint64_t received = 0, planned_received = 0, from_hosts = 0,
                planned_from_hosts = 0;  // in a later step
  std::uint64_t parameters_on_disk = 0;  // bytes, in shards or whole
  std::size_t on_disk = 0;               // how many units have their shard of parameters there
  std::vector<int> skipped;              // steps
};

inline void add_parts(Profile& profile) {
  for (const UnitSpec& unit : profile.units)
    for (const ParameterSpec& parameter : unit.parameters) {
      const std::size_t columns = parameter.shape.back(), rows = parameter.elements() / columns,
                        left = columns / 3;
      const bool is_vector = parameter.shape.size() == 1;
      const WrittenElements written =
          is_vector ? WrittenElements{{}, {{0, columns}}}
                    : WrittenElements{{{0, left, columns, rows}}, {{left, columns - left, columns, rows}}};
      profile.written.emplace_back(static_cast<std::size_t>(parameter.uses), written);
    }
}

inline Profile profile_of(const Case& c) {
  Profile profile = toy::profile(c.micro_batches, {c.dtype}, c.blocks);
  profile.schedule[c.blocks + 2].joined = true;  // the trainer holds the head beside the final unit
  // Units just large enough to be cut, in two chunks.
  profile.units[0].parameters[0].shape = {150, 2048};
  for (UnitId block = 1; block <= c.blocks; ++block) profile.units[block].parameters[0].shape = {2450, 120};
  if (c.in_parts) add_parts(profile);
  return profile;
}

inline PlanRequest request_of(const Case& c, const Where& where, const RankOf& ranks) {
  PlanRequest request;
  request.ranks = ranks;
  for (int rank = 0; c.in_parts && rank < ranks.size; ++rank) request.ranks.parts.push_back(rank % 2);
  request.stage = where.stage;
  request.stages = where.stages;
  request.clip = c.clip > 0;
  request.reproducible = c.reproducible;
  request.group = c.group;
  request.places = where.places;
  request.flags = true;
  return request;
}

inline MachineRates rates() {
  MachineRates rates;
  rates.link = Link{1e9, 1e-5};
  return rates;
}

inline Plan agreed_plan(comm::Communicator& communicator, const Profile& profile,
                        const optim::Optimizer& optimizer, const Case& c, const Where& where) {
  PlanRequest request = request_of(c, where, rank_of(communicator));
  const Budget budget{where.memory, where.disk, 0};
  Plan plan = make_plan(profile, optimizer, budget, request, rates());
  if (communicator.size() > 1 && agree_on_plan(communicator, plan, request))
    plan = make_plan(profile, optimizer, budget, request, rates());
  return plan;
}

inline void take_step(toy::Trainer& trainer, const Case& c, int step, Ran& ran) {
  StepSettings settings = toy::settings(0.01, 0.1, c.clip);
  if (!c.scales.empty()) {
    const double scale = c.scales[static_cast<std::size_t>(step)];
    trainer.gradient_scale = static_cast<float>(scale);
    settings.gradient_factor = 1 / scale;
  }
  double norm = 0;
  try {
    ran.outcome.losses.push_back(trainer.step(settings, &norm));
    ran.outcome.norms.push_back(norm);
  } catch (const Error& error) {
    if (c.scales.empty() || error.code() != ErrorCode::kNotFinite) throw;
    ran.skipped.push_back(step);
  }
}

inline Ran train(comm::Communicator& communicator, const Case& c, const Where& where, int steps) {
  constexpr auto kHost = static_cast<std::size_t>(allocator::Tier::kHost),
                 kDisk = static_cast<std::size_t>(allocator::Tier::kDisk);
  const Profile profile = profile_of(c);
  const auto optimizer = optim::make_optimizer(c.optimizer);
  Plan plan = agreed_plan(communicator, profile, *optimizer, c, where);
  const std::uint64_t spared = plan.serving_pieces > where.pieces ? plan.serving_pieces - where.pieces : 0;
  plan.serving_pieces -= spared;
  Threads threads(1);
  allocator::Ledger ledger;
  const auto file = offload::make_memory_file("the disk");
  const offload::Faults faults = communicator.rank() == 1 ? where.faults : offload::Faults();
  offload::RecordStore disk(offload::alone(offload::make_faulty_file(*file, faults)), ledger);
  const auto products = kernels::load_matrix_library(1);
  Ran ran;
  {
    ScheduledEngine engine(profile, plan, *optimizer,
                           {threads, ledger, &disk, nullptr, products.get(), &communicator});
    for (UnitId u = 0; u < profile.units.size(); ++u) engine.load(u, toy::start_values());
    toy::Trainer trainer(profile, plan, engine);
    trainer.first_micro_batch = static_cast<std::size_t>(communicator.rank()) * c.micro_batches;
    // As a run does, which tells the others its losses. They may be in updates meanwhile that wait for this
    // rank's.
    trainer.before_step = [&] { communicator.exchange(98, "the losses", {}, [&] { engine.serve_ranks(); }); };
    const auto counted = [&] {
      const auto wait_for_all = [&] {
        communicator.exchange(97, "what has come", {}, [&] { engine.serve_ranks(); });
      };
      wait_for_all();
      const comm::Transport::Counters found = communicator.counters();
      wait_for_all();  // so that nobody has begun more
      return found;
    };
    comm::Transport::Counters first;
    for (int step = 0; step < steps; ++step) {
      if (step == 1) first = counted();
      const std::uint64_t before = disk.counters().bytes_read;
      take_step(trainer, c, step, ran);
      engine.settle();
      ran.read = disk.counters().bytes_read - before;
    }
    if (steps > 1) {
      const comm::Transport::Counters last = counted();
      const auto later = static_cast<std::uint64_t>(steps - 1);
      ran.received = (last.received - first.received) / later;
      ran.from_hosts = (last.received_from_hosts - first.received_from_hosts) / later;
    }
    for (UnitId u = 0; u < profile.units.size(); ++u)
      engine.save(u, communicator.rank() == 0 ? toy::collect(ran.outcome, optimizer->state()) : UnitSink{});
    communicator.barrier(99, "the end of a test");
  }
  ran.planned_read_apart = plan.step_bytes_read_apart;
  ran.parameters_on_disk = plan.bytes[kDisk][static_cast<std::size_t>(allocator::Purpose::kParameter)];
  ran.planned_received = plan.step_bytes_received;
  ran.planned_from_hosts = plan.step_bytes_from_hosts;
  ran.on_disk = static_cast<std::size_t>(std::ranges::count(plan.units, true, &UnitPlan::shard_on_disk));
  // The model itself would take its activations and its workspace.
  const auto snapshot = ledger.snapshot();
  EXPECT_EQ(snapshot.total[kDisk].peak, plan.disk_bytes);
  EXPECT_EQ(snapshot.total[kHost].peak + round_up(plan.workspace_bytes, kHugePage) +
                plan.bytes[kHost][static_cast<std::size_t>(allocator::Purpose::kActivation)] +
                round_up((plan.serving_pieces + spared) * StoredShards::kPiece, kHugePage) -
                round_up(plan.serving_pieces * StoredShards::kPiece, kHugePage),
            plan.peak_memory);
  return ran;
}

inline std::vector<Ran> train_all(int ranks, const Case& c, const Where& where, int steps,
                                  comm::World world = comm::World::kThreads) {
  std::vector<Ran> all(static_cast<std::size_t>(ranks));
  comm::run_communicators(world, ranks, [&](comm::Communicator& communicator) {
    try {
      all[static_cast<std::size_t>(communicator.rank())] = train(communicator, c, where, steps);
    } catch (const std::exception& error) {
      communicator.fail(error.what());
      throw;
    }
  });
  return all;
}

}  // namespace sluice::engine::scheduled
