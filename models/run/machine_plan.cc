#include "models/run/machine_plan.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/machine/machine_rates.h"
#include "engine/machine/process.h"
#include "models/run/mesh_choice.h"
#include "models/run/training_setup.h"
#include "offload/disk_folders.h"

namespace sluice::models {
namespace {

// The installed matrix library as it would be on the other machine: its workspace depends on the number of
// threads and on bf16 instructions.
class LibraryThere final : public kernels::MatrixLibrary {
 public:
  explicit LibraryThere(const engine::Machine& machine, int threads)
      : here_(kernels::load_matrix_library(threads)), has_bf16_(machine.bf16_products) {}
  void multiply_f32(const kernels::Product&) override { refuse(); }
  void multiply_by_primitive(const kernels::Product&, void*) override { refuse(); }
  std::size_t hidden_bytes(const kernels::Product& product) const override {
    return here_->hidden_bytes(product);
  }
  bool has_primitive(const kernels::Product& product) const override { return here_->has_primitive(product); }
  std::size_t primitive_workspace(const kernels::Product& product) const override {
    // On a CPU without bf16 products the library does not tell their needs on other CPUs. They are counted as
    // on this one, which widens operands.
    if (product.a.type == Dtype::kBf16 && !here_->has_bf16())
      return kernels::product_workspace(product, *here_);
    return here_->primitive_workspace(product);
  }
  std::size_t primitive_bytes(Dtype type) const override { return here_->primitive_bytes(type); }
  bool has_bf16() const override { return has_bf16_; }
  bool has_bf16_here() const { return here_->has_bf16(); }
  std::string name() const override { return here_->name(); }
  int threads() const override { return here_->threads(); }

 private:
  [[noreturn]] static void refuse() {
    fail(ErrorCode::kInternal, "another machine's library is to multiply");
  }
  std::unique_ptr<kernels::MatrixLibrary> here_;
  bool has_bf16_;
};

const engine::Machine::Disk& disk_named(const std::string& name, const engine::Machine& machine) {
  const auto found = std::ranges::find(machine.disks, name, &engine::Machine::Disk::folder);
  if (found != machine.disks.end()) return *found;
  std::vector<std::string> names;
  for (const engine::Machine::Disk& disk : machine.disks) names.push_back(disk.folder);
  fail(ErrorCode::kInvalidArgument,
       "--disk: '{}' is no disk of the machine of '{}', which has {}; name one of these, or write it into "
       "that file",
       name, machine.source, names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")));
}

// Returns what resolve_disk() would give each of `sharers` ranks of the disk, where no limit is stated.
std::uint64_t lent_whole(const engine::Machine::Disk& disk, int sharers) {
  return disk.free / 20 * 19 / static_cast<std::uint64_t>(sharers);
}

std::vector<offload::DiskKnowledge> resolve_disks(const engine::Machine& machine, TrainSettings& s) {
  if (s.disk.empty())
    for (const engine::Machine::Disk& disk : machine.disks)
      s.disk.push_back({disk.folder, offload::kWholeDisk});
  std::vector<offload::DiskKnowledge> known;
  for (offload::DiskFolder& folder : s.disk) {
    const engine::Machine::Disk& disk = disk_named(folder.path, machine);
    if (folder.limit == offload::kWholeDisk) folder.limit = lent_whole(disk, s.ranks_here);
    known.push_back(disk.known);
  }
  return known;
}

engine::MachineRates rates_there(const engine::Machine& machine, const TrainSettings& s,
                                 const std::vector<offload::DiskKnowledge>& disks,
                                 std::vector<std::string>& not_known) {
  engine::MachineRates rates;
  rates.products = machine.products;
  rates.flops = flops_of(engine::product_of(768, 768, 768, Dtype::kF32), rates);
  const bool native = s.dtype == Dtype::kBf16 && machine.bf16_products;
  const Dtype computed = native ? Dtype::kBf16 : Dtype::kF32;
  const auto of_type = [&](const auto& type) {
    return [&](const auto& rate) { return type(rate) == s.dtype; };
  };
  if (std::ranges::none_of(rates.products,
                           of_type([](const engine::ProductRate& r) { return r.product.a.type; })))
    not_known.push_back(fmt::format("products of {}, which count as those of f32", name_of(s.dtype)));
  const auto attention = std::ranges::find(machine.attention, s.dtype, &engine::Machine::Attention::type);
  if (attention != machine.attention.end())
    rates.attention = attention->flops;
  else
    not_known.push_back(
        fmt::format("attention of {}, which counts as products of {}", name_of(s.dtype), name_of(computed)));
  rates.memory_bandwidth = machine.memory_bandwidth;
  const optim::Storage& storage = s.optimizer.storage;
  const auto update = std::ranges::find_if(machine.updates, [&](const engine::Machine::Update& u) {
    return u.optimizer == s.optimizer.name && u.type == s.dtype && u.state == storage.state &&
           u.master == storage.master;
  });
  if (update != machine.updates.end())
    rates.update_seconds = 1 / update->elements;
  else
    not_known.push_back(
        fmt::format("updates of {} of {} with this state, which count by the bandwidth of memory",
                    s.optimizer.name, name_of(s.dtype)));
  engine::share_cores(s.ranks_here, s.threads, machine.cores, machine.cores, rates);
  count_transport(s, machine.cores, rates);
  engine::add_disk(disks, s.ranks_here, rates);
  rates.cores = s.threads;
  for (const offload::DiskFolder& folder : s.disk) {
    const offload::DiskKnowledge& known = disk_named(folder.path, machine).known;
    if (known.rates.together == 0)
      not_known.push_back(
          fmt::format("how '{}' reads and writes at once, which count as if they took turns", folder.path));
    if (known.processor_seconds == 0)
      not_known.push_back(
          fmt::format("what transfers of '{}' take of the cores, which count as nothing", folder.path));
  }
  return rates;
}

}  // namespace

PlanResult plan_for_machine(const TrainSettings& settings, const engine::Machine& machine) {
  Setup setup = begin_setup(settings, &machine);
  TrainSettings& s = setup.settings;
  PlanResult& plan = setup.plan;
  plan.machine = machine.source;
  const std::vector<offload::DiskKnowledge> disks = resolve_disks(machine, s);
  const LibraryThere library(machine, s.threads);
  if (s.dtype == Dtype::kBf16 && library.has_bf16() != library.has_bf16_here())
    plan.not_known.push_back(
        "what the matrix library takes there for products of bf16, which counts as here");
  plan.rates = rates_there(machine, s, disks, plan.not_known);
  plan.budget = {s.memory, offload::usable_disk(s.disk),
                 engine::process_bytes(machine.memory.process, s.threads) + plan.checkpoint_buffers +
                     plan.trace_bytes + s.communication_bytes};
  const PlanBasis basis = {setup.config, *setup.optimizer, library, plan, machine.cores};
  if (s.chooses_mesh) {
    plan.mesh_choice = choose_mesh(basis, s);
    s.mesh = plan.mesh_choice->mesh;
  }
  return *plan_on_mesh(basis, s);
}

}  // namespace sluice::models
