#include "models/run/run_ranks.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/bytes.h"
#include "core/checksum.h"
#include "core/error.h"
#include "core/json.h"
#include "core/pairwise.h"
#include "core/system.h"
#include "core/text_file.h"
#include "engine/machine/link_rate.h"
#include "engine/ranks/agreement.h"
#include "models/run/mesh_links.h"
#include "models/run/pipeline_plan.h"
#include "models/run/training_run.h"

namespace sluice::models {
namespace {

std::string bytes_of(const std::vector<double>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)};
}

std::vector<double> doubles_of(const std::string& bytes, std::size_t count, const char* name) {
  std::vector<double> values(count);
  ensure(bytes.size() == count * sizeof(double), "{} have {} bytes of {}", name, bytes.size(),
         count * sizeof(double));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Ranks may differ in CPU, threads and matrix library, unless the run is reproducible. Ranks that share a
// model's sections or layers must agree on groups and recomputation, so that their collective calls match.
Json comparable(const Setup& setup, bool shares_layers) {
  Json record = run_record(setup, {});
  for (const char* own : {"cpu", "threads", "matrix_library"})
    if (!setup.settings.plan.reproducible) record.erase(own);
  record["held_out"] = setup.settings.held_out;
  record["eval_every"] = setup.settings.eval_every;
  record["eval_batches"] = setup.settings.eval_batches;
  record["save_every"] = setup.settings.save_every;
  record["trace"] = !setup.settings.trace.empty();
  record["saves"] = !setup.settings.out.empty();
  record["resume"] = setup.settings.resume;
  record["pipeline"] = engine::name_of(setup.settings.pipeline);
  record["chunks"] = setup.settings.chunks;
  record["stages"] = setup.settings.stages.value_or("");
  record["grain"] = setup.settings.grain.value_or(0);
  record["sequence-grain"] = setup.settings.sequence_grain.value_or(0);
  const engine::PlanRequest& plan = setup.settings.plan;
  if (sections_of(setup.settings) > 1 || shares_layers) record["group"] = plan.group.value_or(0);
  if (shares_layers) record["recompute"] = plan.recompute.value_or("auto");
  return record;
}

// Returns whether `plan` succeeds without a lack of memory.
bool is_within_budget(const std::function<void()>& plan) {
  try {
    plan();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBudget) throw;
    return false;
  }
  return true;
}

}  // namespace

RunRanks::RunRanks(const TrainSettings& s) : communicator_(s.communicator), mesh_(s.mesh) {
  if (communicator_ == nullptr) return;
  if (mesh_ && mesh_->ranks() != size())
    sluice::fail(ErrorCode::kInvalidArgument, "--mesh {} is of {} ranks, and there are {}", mesh_->text(),
                 mesh_->ranks(), size());
  data_rank_ = models::data_rank(s, rank());
  data_size_ = models::data_size(s);
  of_section_ = communicator_;
  if (!mesh_) return;
  for (int section = 0; section < mesh_->size("pipeline"); ++section)
    by_section_.push_back(ranks_of_section(s, section));
  const auto group = [&](const std::vector<int>& members) {
    return members.size() == 1 ? nullptr : communicator_->group(members);
  };
  sections_ = group(mesh_->along(rank(), "pipeline"));
  tensor_ = group(mesh_->along(rank(), "tensor"));
  sequence_ = group(mesh_->along(rank(), "sequence"));
  own_section_ = group(by_section_[static_cast<std::size_t>(section())]);
  of_section_ = own_section_.get();
  for (int rank = 0; is_cut() && rank < size(); ++rank) communicator_->describe(rank, mesh_->place(rank));
}

std::vector<int> RunRanks::ranks_of(int section) const {
  if (!by_section_.empty()) return by_section_[static_cast<std::size_t>(section)];
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<std::string> RunRanks::from_all(const std::string& name, const std::string& own) {
  if (communicator_ == nullptr) return {own};
  return engine::exchange(*communicator_, name, own, meanwhile_);
}

void RunRanks::compare(const Setup& setup) {
  if (communicator_ == nullptr) return;
  const std::vector<std::string> all =
      from_all("the settings of the run", comparable(setup, shares_layers()).dump());
  for (int rank = 1; rank < size(); ++rank) {
    const std::vector<std::string> found =
        differences(Json::parse(all[0]), Json::parse(all[static_cast<std::size_t>(rank)]));
    if (!found.empty())
      sluice::fail(
          ErrorCode::kInvalidArgument,
          "rank {} was given other values than rank 0, which stand first: {}; start all ranks with the "
          "same program, settings and data",
          rank, fmt::join(found, "; "));
  }
}

std::optional<engine::Link> RunRanks::link(std::uint64_t memory) {
  if (size() == 1) return std::nullopt;
  return engine::measure_link(*communicator_, memory, meanwhile_);
}

void RunRanks::agree_on_plan(Setup& setup) {
  if (section_size() == 1) return;
  const auto fit_again = [&] { fit(setup.plan, setup.settings, *setup.optimizer, setup.settings.threads); };
  if (shares_layers() && engine::agree_on_order(*of_section_, setup.plan.plan, setup.plan.profile,
                                                setup.settings.plan, meanwhile_))
    fit_again();
  const engine::Plan own = setup.plan.plan;
  engine::PlanRequest lowest = setup.settings.plan;
  const bool differs = engine::agree_on_plan(*of_section_, own, setup.settings.plan, meanwhile_);
  const bool fits = !differs || is_within_budget(fit_again);
  const std::vector<std::string> all =
      engine::exchange(*of_section_, "whether the plan fits", fits ? "yes" : "no", meanwhile_);
  if (std::ranges::count(all, "no") == 0) return;
  // If one rank needs a higher stage, another one may not fit with it.
  engine::agree_on_plan(*of_section_, own, lowest, meanwhile_, engine::Stages::kLowest);
  setup.settings.plan = lowest;
  fit_again();
}

std::string RunRanks::from_first(const std::string& text) { return from_all("a choice of rank 0", text)[0]; }

void RunRanks::check_all_read(const std::string& path, const std::string& named) {
  if (size() == 1) return;
  std::string found = "none";
  try {
    const std::string text = read_text_file(path);
    found = fmt::format("{:016x}", checksum(std::as_bytes(std::span(text))));
  } catch (const Error&) {  // all ranks are told
  }
  const std::vector<std::string> files = from_all("which file each rank reads", found);
  const std::vector<std::string> hosts = from_all("which host each rank is on", host_name());
  for (std::size_t rank = 1; rank < files.size(); ++rank)
    if (files[rank] != files[0])
      sluice::fail(ErrorCode::kNotFound,
                   "rank {} on host '{}' {} '{}', which rank 0 on host '{}' has found and {}; all ranks read "
                   "it, so give them one folder that all hosts see, or copy rank 0's there",
                   rank, hosts[rank], files[rank] == "none" ? "cannot read" : "reads another", path, hosts[0],
                   named);
}

std::uint64_t RunRanks::sum(std::uint64_t count) {
  if (data_size() == 1 && sequence_ == nullptr) return count;
  const std::vector<std::string> told =
      engine::exchange(*of_section_, "the targets of a step", std::to_string(count), meanwhile_);
  std::uint64_t all = 0;
  for (const std::string& text : told) all += std::stoull(text);
  return tensor_ ? all / static_cast<std::uint64_t>(tensor_->size()) : all;
}

std::vector<std::vector<double>> RunRanks::of_last(const std::vector<std::string>& all,
                                                   std::size_t count) const {
  const int last = sections_ == nullptr ? 0 : sections_->size() - 1;
  const auto at = [&](int rank, const char* axis) { return mesh_ ? mesh_->coordinate(rank, axis) : 0; };
  using Parts = std::vector<std::vector<double>>;  // by number, by part of a sequence
  std::vector<Parts> found(static_cast<std::size_t>(data_size()), Parts(count));
  for (const int rank : ranks_of(last)) {
    if (at(rank, "tensor") > 0) continue;  // ranks along "tensor" have the same
    const std::vector<double> told =
        doubles_of(all[static_cast<std::size_t>(rank)], count, "a rank's losses");
    Parts& parts = found[static_cast<std::size_t>(mesh_ ? at(rank, "data") : rank)];
    for (std::size_t i = 0; i < count; ++i) parts[i].push_back(told[i]);
  }
  std::vector<std::vector<double>> sums(found.size());
  for (std::size_t data = 0; data < found.size(); ++data)
    for (const std::vector<double>& parts : found[data]) sums[data].push_back(pairwise_sum<double>(parts));
  return sums;
}

RunRanks::Outcome RunRanks::combine(Outcome own) {
  const std::size_t count = own.losses.size();
  own.losses.push_back(own.stop ? 1 : 0);
  Outcome all;
  std::vector<std::string> told = from_all("the losses of a step", bytes_of(own.losses));
  for (std::string& bytes : told) {
    all.stop |= doubles_of(bytes, count + 1, "a rank's losses").back() != 0;
    bytes.resize(count * sizeof(double));
  }
  for (const std::vector<double>& losses : of_last(told, count))
    all.losses.insert(all.losses.end(), losses.begin(), losses.end());
  return all;
}

double RunRanks::mean(const std::vector<double>& losses, const std::vector<double>& targets,
                      std::uint64_t count) {
  // Some ranks have measured one micro-batch more than others.
  const std::size_t most = divide_up(count, static_cast<std::uint64_t>(data_size()));
  std::vector<double> own(2 * most);
  std::ranges::copy(losses, own.begin());
  std::ranges::copy(targets, own.begin() + static_cast<std::ptrdiff_t>(most));
  const std::vector<std::vector<double>> all =
      of_last(from_all("the losses of a validation", bytes_of(own)), own.size());
  double sum = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::vector<double>& found = all[i % all.size()];
    sum += found[i / all.size()] / found[most + i / all.size()];
  }
  return sum / static_cast<double>(count);
}

std::string RunRanks::place() const { return is_cut() ? mesh_->place(rank()) : ""; }

// Other kinds of errors have a special meaning on a rank itself that they lack on the others: for example a
// gradient that is not finite skips its step.
void RunRanks::fail(const std::exception& error) noexcept {
  if (communicator_ == nullptr) return;
  const auto* const own = dynamic_cast<const Error*>(&error);
  const bool is_of_request =
      own != nullptr && (own->code() == ErrorCode::kInvalidArgument || own->code() == ErrorCode::kBudget);
  communicator_->fail(error.what(), is_of_request ? own->code() : ErrorCode::kIo);
}

}  // namespace sluice::models
