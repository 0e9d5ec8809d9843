#pragma once
// Trains a small model with ranks that are threads, of which one meets a fault. Either the run ends with the
// bits of an undisturbed one, or every rank ends with an error that names the rank which failed first,
// nothing but whole checkpoints is left, and going on from the last one leads to those bits.

#include "comm/faulty_links.h"
#include "comm/local_links.h"
#include "core/checksum.h"
#include "engine/checkpoint/support.h"
#include "engine/faulty_runs.h"
#include "engine/planner/planner.h"
#include "engine/saving/checkpoint_values.h"
#include "engine/steps/any_order_engine.h"

namespace sluice::engine::faulty {

struct RankSetup {
  bool any_order = false;     // which kind of engine
  bool reproducible = false;  // so that the number of ranks does not change the bits
  int ranks = 2;              // 1: there is no communicator
  std::size_t stage = 0;
  std::array<const char*, 3> places = {"memory", "memory", "memory"};
  std::size_t optimizer = 0;
  Dtype dtype = Dtype::kF32;
  bool clip = true;
};

enum class FaultOfRank : std::uint8_t {
  kFailedRead,
  kFailedWrite,
  kFullDisk,
  kShortFile,
  kReadFlip,
  kWriteFlip,
  kLostWrite,
  kSlowDisk,
  kSlowLink,
  kCutLink,
  kThrow,
  kFullCheckpointDisk
};
// In the order of FaultOfRank. `set` is null where the fault is none of a disk.
struct KindOfFault {
  const char* name;
  void (*set)(Faults& faults, double rate, std::uint64_t transfer) = nullptr;
};
inline constexpr KindOfFault kFaultsOfRanks[] = {
    {"a failed read", [](Faults& faults, double rate, std::uint64_t) { faults.read_error = rate; }},
    {"a failed write", [](Faults& faults, double rate, std::uint64_t) { faults.write_error = rate; }},
    {"a full disk", [](Faults& faults, double, std::uint64_t transfer) { faults.fail_after = transfer; }},
    {"a short file",
     [](Faults& faults, double, std::uint64_t transfer) { faults.truncate_after = transfer; }},
    {"a read flip", [](Faults& faults, double rate, std::uint64_t) { faults.read_flip = rate; }},
    {"a write flip", [](Faults& faults, double rate, std::uint64_t) { faults.write_flip = rate; }},
    {"a lost write", [](Faults& faults, double rate, std::uint64_t) { faults.lost_write = rate; }},
    {"a slow disk", [](Faults& faults, double, std::uint64_t) { faults.delay_microseconds = 300; }},
    {"a slow link"},
    {"a link that is cut"},
    {"a client that throws"},
    {"a full disk of checkpoints"}};

struct RankFault {
  FaultOfRank kind = FaultOfRank::kSlowLink;
  int rank = -1;  // none
  std::uint64_t random = 0;
};

inline constexpr std::uint64_t kRankSteps = 3;
inline constexpr std::size_t kMicroBatches = 6;  // of all ranks in a step

inline RankSetup rank_setup_of(std::uint64_t seed) {
  static constexpr const char* kPlaces[] = {"memory", "disk"};
  const auto words =
      philox({static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), 1, 1}, {2, 9});
  RankSetup setup{.any_order = words[0] % 2 == 0,
                  .reproducible = words[0] / 2 % 3 == 0,
                  .ranks = words[0] / 8 % 3 == 0 ? 3 : 2,
                  .stage = words[1] % (kMostStage + 1)};
  // Most have something on disk. What is partitioned at stage 3 is in memory.
  for (std::size_t i = 0; i < 3; ++i) setup.places[i] = kPlaces[words[1] / (4u << i) % 8 < 5 ? 1 : 0];
  setup.optimizer = words[2] % optimizers().size();
  setup.dtype = kTypes[words[2] / 8 % std::size(kTypes)];
  setup.clip = words[2] / 64 % 2 == 0;
  return setup;
}

inline std::string describe(const RankSetup& s) {
  const optim::OptimizerSettings& optimizer = optimizers()[s.optimizer];
  return fmt::format(
      "{} ranks, stage {}, {} order{}, parameters {} gradients {} state {}, {} in {}, {} clip {}", s.ranks,
      s.stage, s.any_order ? "any" : "scheduled", s.reproducible ? ", reproducible" : "", s.places[0],
      s.places[1], s.places[2], optimizer.name, optim::state_type_name(optimizer.storage.state),
      name_of(s.dtype), s.clip);
}

inline Faults disk_faults_of(const RankFault& fault) {
  Faults faults;
  faults.seed = fault.random;
  if (const auto set = kFaultsOfRanks[static_cast<std::size_t>(fault.kind)].set)
    set(faults, fault.random % 2 == 0 ? 0.01 : 0.1, fault.random % 60);
  return faults;
}

// One rank: its engine, and what a client does with it.
class TrainingRank {
 public:
  TrainingRank(const RankSetup& setup, comm::Communicator* communicator, const RankFault& fault,
               allocator::Ledger& ledger, std::atomic<std::uint64_t>* injected)
      : setup_(setup),
        communicator_(communicator),
        rank_(communicator == nullptr ? 0 : communicator->rank()),
        is_hit_(fault.rank == rank_),
        fault_(fault),
        ledger_(ledger),
        optimizer_(optimizer_of({.optimizer = setup.optimizer, .dtype = setup.dtype})),
        profile_(profile_for(setup)),
        plan_(make_plan(profile_, *optimizer_, {kGiB, kGiB, 0}, request(), {})),
        disks_(is_hit_ ? disk_faults_of(fault) : Faults{}, injected),
        store_(std::move(disks_.faulty), ledger) {
    const Resources resources{threads_, ledger, &store_, nullptr, nullptr, communicator};
    if (setup.any_order)
      any_ = std::make_unique<AnyOrderEngine>(profile_, plan_, *optimizer_, resources);
    else
      scheduled_ = std::make_unique<ScheduledEngine>(profile_, plan_, *optimizer_, resources);
    accesses_left_ = is_hit_ && fault.kind == FaultOfRank::kThrow ? fault.random % 100 : UINT64_MAX;
    if (is_hit_ && fault.kind == FaultOfRank::kFullCheckpointDisk)
      files_.fail_write = static_cast<int>(fault.random % 30);
  }

  // From the checkpoint in that folder, or from the first values where there is none. Returns its step.
  std::uint64_t load(const std::string& checkpoint) {
    if (checkpoint.empty()) {
      load_units(toy::start_values());
      return 0;
    }
    const allocator::Region memory(ledger_, allocator::Purpose::kCheckpoint, 16 * kMiB);
    ReadAhead ahead(memory.bytes());
    const CheckpointReader reader(files_, checkpoint, ahead);
    CheckpointValues values(reader, engine().layout(), *optimizer_);
    load_units(values.source());
    engine().settle();
    engine().set_steps(reader.step());
    return reader.step();
  }

  void step(std::uint64_t number) {
    StepSettings settings = toy::settings(0.01, 0.1, setup_.clip ? 5.0 : 0.0);
    const std::size_t first = static_cast<std::size_t>(rank_) * profile_.micro_batches;
    if (any_ != nullptr) return step_in_any_order(number, settings, first);
    toy::Trainer trainer(profile_, plan_, *scheduled_);
    trainer.first_micro_batch = (number - 1) * kMicroBatches + first;
    trainer.before_access = [this] { count_access(); };
    if (setup_.dtype == Dtype::kF16) {  // with a loss scale, as f16 is trained
      trainer.gradient_scale = 256;
      settings.gradient_factor = 1.0 / 256;
    }
    trainer.step(settings);
  }

  void save(const std::string& out, std::uint64_t step) {
    engine().settle();
    CheckpointTensors tensors(engine().layout(), *optimizer_);
    const std::string folder =
        tensors.save(engine(), files_, ledger_,
                     {.out = out, .step = step, .buffer_bytes = tensors.buffer_bytes(setup_.ranks)},
                     {{"of", "a test"}}, {}, communicator_);
    ensure(folder == out + fmt::format("/step-{:08}", step), "rank {} got the folder '{}'", rank_, folder);
  }

  // Ends together with the others, of which none needs this one any more.
  void end() {
    engine().settle();
    if (communicator_ != nullptr) communicator_->barrier(1, "the end of a run");
  }

 private:
  Engine& engine() { return any_ != nullptr ? static_cast<Engine&>(*any_) : *scheduled_; }
  static Profile profile_for(const RankSetup& setup) {
    const std::size_t micro_batches = kMicroBatches / static_cast<std::size_t>(setup.ranks);
    Profile profile = small_profile(setup.dtype);
    profile.micro_batches = micro_batches;
    for (Access& access : profile.schedule)  // the tied head is held with the norm before it
      access.joined = access.unit == 0 && access.gradient_use == 0;
    if (!setup.any_order) return profile;
    profile = any_order_profile(profile.units, 2);
    profile.micro_batches = micro_batches;
    profile.ends_micro_batches = true;
    return profile;
  }
  PlanRequest request() const {
    PlanRequest request;
    request.ranks = {rank_, setup_.ranks};
    request.stage = setup_.stage;
    request.clip = setup_.clip || setup_.any_order;
    request.reproducible = setup_.reproducible;
    request.group = 1;
    request.chunk_elements = kChunkGrain;
    request.places = toy::places(setup_.places[0], setup_.places[1], setup_.places[2]);
    if (setup_.stage == 3 && setup_.ranks > 1) request.places[0].reset();
    return request;
  }
  void load_units(const UnitSource& source) {
    for (UnitId unit = 0; unit < profile_.units.size(); ++unit) engine().load(unit, source);
  }

  void step_in_any_order(std::uint64_t number, const StepSettings& settings, std::size_t first) {
    any_->begin_step({});
    for (std::size_t m = first; m < first + kMicroBatches / static_cast<std::size_t>(setup_.ranks); ++m) {
      for (UnitId unit = static_cast<UnitId>(profile_.units.size()); unit-- > 0;) {
        count_access();
        add_gradients(unit, (number - 1) * kMicroBatches + m);
        if (!setup_.reproducible) any_->end_gradients(unit);
      }
      any_->end_micro_batch();
    }
    any_->step(settings);
  }
  void add_gradients(UnitId unit, std::size_t micro_batch) {
    const Layout& layout = any_->layout();
    any_->acquire(unit, Hold::kGradient);
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p) {
      const ConstArray values = any_->parameter(p);
      std::vector<float> gradient(layout.location(p).elements);
      test::mix_with_noise(gradient.size(), values, {1, -0.01f}, micro_batch * 17, false, gradient.data());
      any_->add_gradient(p, {gradient.data(), Dtype::kF32});
    }
    any_->release(unit);
  }

  void count_access() {
    if (accesses_left_-- == 0) throw std::runtime_error("the client throws");
  }

  const RankSetup setup_;
  comm::Communicator* const communicator_;
  const int rank_;
  const bool is_hit_;
  const RankFault fault_;
  allocator::Ledger& ledger_;
  const std::unique_ptr<optim::Optimizer> optimizer_;
  const Profile profile_;
  const Plan plan_;
  Threads threads_{1};
  Disks disks_;
  offload::RecordStore store_;
  HeldFiles files_;
  std::uint64_t accesses_left_ = 0;
  std::unique_ptr<ScheduledEngine> scheduled_;
  std::unique_ptr<AnyOrderEngine> any_;
};

inline std::unique_ptr<comm::Links> links_of(comm::LocalMemory& memory, int rank, const RankSetup& setup,
                                             const RankFault& fault) {
  auto links = comm::make_local_links(memory, rank);
  if (rank != fault.rank) return links;
  comm::LinkFaults faults{.seed = fault.random};
  if (fault.kind == FaultOfRank::kSlowLink) {
    faults.refused = 0.1;
    faults.held_back = 0.3;
    faults.most_microseconds = 2000;
    faults.packet_bytes = fault.random % 2 == 0 ? 1024 : 65536;
  } else if (fault.kind == FaultOfRank::kCutLink) {
    faults.cut_rank = (rank + 1) % setup.ranks;
    faults.cut_after = 1 + fault.random % 400;
  } else {
    return links;
  }
  return comm::make_faulty_links(std::move(links), faults);
}

// Each rank's error; an empty one says that the rank ended well.
using RankErrors = std::vector<std::string>;

// Trains on from `checkpoint` and saves each step in `out`. `left` gets what the ranks have not given back.
inline RankErrors run_ranks(const RankSetup& setup, const RankFault& fault, const std::string& checkpoint,
                            const std::string& out, std::atomic<std::uint64_t>* injected = nullptr,
                            std::string* left = nullptr) {
  RankErrors errors(static_cast<std::size_t>(setup.ranks));
  std::vector<std::uint64_t> held(errors.size());
  comm::LocalMemory memory(std::max(2, setup.ranks), std::size_t{1} << 20);
  const auto body = [&](int rank) {
    allocator::Ledger ledger;
    try {
      std::optional<comm::Communicator> communicator;
      if (setup.ranks > 1)
        communicator.emplace(links_of(memory, rank, setup, fault),
                             comm::Deadlines{std::chrono::seconds(10), std::chrono::seconds(40)}, ledger);
      try {
        TrainingRank training(setup, communicator ? &*communicator : nullptr, fault, ledger, injected);
        for (std::uint64_t step = training.load(checkpoint) + 1; step <= kRankSteps; ++step) {
          training.step(step);
          training.save(out, step);
        }
        training.end();
      } catch (const std::exception& error) {  // as every client of ranks does
        if (communicator) communicator->fail(error.what());
        throw;
      }
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
    for (const auto& tier : ledger.snapshot().total) held[static_cast<std::size_t>(rank)] += tier.current;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setup.ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
  for (std::size_t rank = 0; left != nullptr && rank < held.size(); ++rank)
    if (held[rank] != 0) *left += fmt::format("rank {} has not given back {} bytes\n", rank, held[rank]);
  return errors;
}

// The digests of the files of a checkpoint, by name.
using FileDigests = std::map<std::string, std::uint64_t>;
inline FileDigests digests_of(const std::string& checkpoint) {
  FileDigests digests;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
    const std::string bytes = read_all(entry.path());
    digests[entry.path().filename()] = checksum(std::as_bytes(std::span(bytes)));
  }
  return digests;
}

inline std::string step_name(std::uint64_t step) { return fmt::format("step-{:08}", step); }

// The checkpoints of a run without faults, in memory, at stage 0: of one rank where that has the same bits.
inline const std::vector<FileDigests>& undisturbed(const RankSetup& setup) {
  using Key = std::tuple<bool, bool, int, std::size_t, Dtype, bool>;
  static std::map<Key, std::vector<FileDigests>> all;
  const RankSetup base{.any_order = setup.any_order,
                       .reproducible = setup.reproducible,
                       .ranks = setup.reproducible ? 1 : setup.ranks,
                       .optimizer = setup.optimizer,
                       .dtype = setup.dtype,
                       .clip = setup.clip};
  std::vector<FileDigests>& made =
      all[{base.any_order, base.reproducible, base.ranks, base.optimizer, base.dtype, base.clip}];
  if (!made.empty()) return made;
  const TemporaryFolder folder;
  for (const std::string& error : run_ranks(base, {}, "", folder.path()))
    if (!error.empty()) throw std::logic_error("a run without faults failed: " + error);
  for (std::uint64_t step = 1; step <= kRankSteps; ++step)
    made.push_back(digests_of(folder.path(step_name(step))));
  return made;
}

struct RanksEnding {
  bool well = false;
  std::string error;   // of the rank that was hit
  std::string defect;  // what is wrong; empty: nothing
};

// Every rank but the one that was hit names it. Where a connection is cut, both ends accuse each other.
inline std::string defect_of(const RankErrors& errors, const RankSetup& setup, const RankFault& fault) {
  std::string defect;
  const std::string hit = fmt::format("rank {}", fault.rank),
                    other = fmt::format("rank {}", (fault.rank + 1) % setup.ranks);
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    const std::string& error = errors[rank];
    const bool is_cut = fault.kind == FaultOfRank::kCutLink;
    const bool names =
        error.find(hit) != std::string::npos || (is_cut && error.find(other) != std::string::npos);
    if (error.empty())
      defect += fmt::format("rank {} ended without an error\n", rank);
    else if (!names && (is_cut || static_cast<int>(rank) != fault.rank))
      defect += fmt::format("rank {} names another one than {}: {}\n", rank, hit, error);
  }
  return defect;
}

// Returns what is wrong with the folder that a run has left; `last` gets the newest checkpoint.
inline std::string defect_of_folder(const std::string& out, const std::vector<FileDigests>& base,
                                    std::string& last) {
  std::string defect;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(out))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  for (const std::string& name : names) {
    std::uint64_t step = 1;
    while (step <= kRankSteps && name != step_name(step)) ++step;
    if (step > kRankSteps) {
      defect += "left: " + name + "\n";
      continue;
    }
    last = out + "/" + name;
    if (digests_of(last) != base[step - 1]) defect += name + " has other bits\n";
  }
  return defect;
}

// Goes on from a checkpoint with other stages and places, and other ranks where that has the same bits.
inline RankSetup going_on(RankSetup setup, std::uint64_t random) {
  const RankSetup other = rank_setup_of(random);
  setup.stage = other.stage;
  setup.places = other.places;
  if (setup.reproducible) setup.ranks = 1 + static_cast<int>(random % 3);
  return setup;
}

inline RanksEnding run_with(const RankSetup& setup, const RankFault& fault,
                            std::atomic<std::uint64_t>* injected = nullptr) {
  const std::vector<FileDigests>& base = undisturbed(setup);
  const TemporaryFolder folder;
  RanksEnding ending;
  const RankErrors errors = run_ranks(setup, fault, "", folder.path(), injected, &ending.defect);
  ending.well = std::ranges::all_of(errors, &std::string::empty);
  ending.error = errors[static_cast<std::size_t>(std::max(0, fault.rank))];
  if (!ending.well) ending.defect += defect_of(errors, setup, fault);
  std::string last;
  ending.defect += defect_of_folder(folder.path(), base, last);
  if (ending.well && !last.ends_with(step_name(kRankSteps))) ending.defect += "checkpoints are missing\n";
  if (ending.well) return ending;
  const RankSetup next = going_on(setup, fault.random);
  for (const std::string& error : run_ranks(next, {}, last, folder.path(), nullptr, &ending.defect))
    if (!error.empty()) ending.defect += fmt::format("going on ({}) fails: {}\n", describe(next), error);
  last.clear();
  ending.defect += defect_of_folder(folder.path(), base, last);
  if (!last.ends_with(step_name(kRankSteps))) ending.defect += "a run that went on has not come to its end\n";
  return ending;
}

inline RankFault rank_fault_of(std::uint64_t seed, const RankSetup& setup) {
  const auto words =
      philox({static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), 5, 5}, {3, 8});
  return {static_cast<FaultOfRank>(words[0] % std::size(kFaultsOfRanks)),
          static_cast<int>(words[1] % static_cast<std::uint32_t>(setup.ranks)), words[2]};
}

inline std::string describe(const RankSetup& setup, const RankFault& fault, std::uint64_t seed) {
  return fmt::format("seed {}: {}; {} at rank {}", seed, describe(setup),
                     kFaultsOfRanks[static_cast<std::size_t>(fault.kind)].name, fault.rank);
}

}  // namespace sluice::engine::faulty
