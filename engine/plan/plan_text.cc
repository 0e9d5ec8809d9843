#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/plan/plan.h"
#include "engine/plan/rows_of_tokens.h"

namespace sluice::engine {
namespace {

using allocator::kPurposes;
using allocator::Purpose;
using allocator::Tier;

std::string cell(std::uint64_t bytes) { return bytes == 0 ? "-" : format_size(bytes); }

template <class Condition>
std::size_t count(const Plan& plan, const Condition& holds) {
  return static_cast<std::size_t>(std::ranges::count_if(plan.units, holds));
}

std::size_t count_resident(const Plan& plan, Part part) {
  return count(plan, [part](const UnitPlan& unit) { return unit.resident(part); });
}

// Returns the choice of the unit with most choices, a block; most units have the same one.
const ActivationChoice& common_choice(const Plan& plan, const Profile& profile) {
  std::size_t widest = 0;
  for (std::size_t u = 0; u < plan.units.size(); ++u)
    if (profile.unit_profiles[u].choices.size() > profile.unit_profiles[widest].choices.size()) widest = u;
  return profile.unit_profiles[widest].choices[plan.units[widest].choice];
}

std::string_view common_dtype(const Profile& profile) {
  const auto is_first = [&](const UnitSpec& unit) { return unit.dtype == profile.units.front().dtype; };
  return std::all_of(profile.units.begin(), profile.units.end(), is_first)
             ? name_of(profile.units.front().dtype)
             : "mixed";
}

bool has_f16(const Profile& profile) {
  return std::any_of(profile.units.begin(), profile.units.end(),
                     [](const UnitSpec& unit) { return unit.dtype == Dtype::kF16; });
}

// "stage 2"; or "stages 0 (1 unit) and 3 (12 units)".
std::string stages_text(const Plan& plan) {
  if (const auto stage = plan.one_stage()) return fmt::format("stage {}", *stage);
  std::vector<std::string> each;
  for (std::size_t stage = 0; stage <= kMostStage; ++stage)
    if (const auto units = count(plan, [&](const UnitPlan& unit) { return unit.stage == stage; }); units > 0)
      each.push_back(fmt::format("{} ({} {})", stage, units, units == 1 ? "unit" : "units"));
  const std::string last = each.back();
  each.pop_back();
  return fmt::format("stages {} and {}", fmt::join(each, ", "), last);
}

std::string ranks_text(const Plan& plan, bool any_order) {
  const auto has_shard = [](const UnitPlan& unit) { return unit.tier(Part::kParameters) == Tier::kRanks; };
  const std::size_t on_disk = count(plan, [](const UnitPlan& unit) { return unit.shard_on_disk; });
  const std::size_t on_gpu = count(plan, &UnitPlan::shard_on_gpu);
  std::string text = fmt::format(
      "ranks             this is rank {} of {}, at {}: it has a shard of the parameters of {}/{} "
      "units{}, of final gradients of {}, and of the optimizer state of {}\n",
      plan.ranks.rank, plan.ranks.size, stages_text(plan), count(plan, has_shard), plan.units.size(),
      on_disk > 0               ? fmt::format(" ({} of them on disk)", on_disk)
      : on_gpu > 0              ? fmt::format(" ({} of them on the GPU)", on_gpu)
      : plan.passing_places > 0 ? " (which its GPU brings for all)"
                                : "",
      count(plan, [](const UnitPlan& unit) { return unit.gradient_in_shards; }),
      count(plan, [](const UnitPlan& unit) { return unit.stage > 0; }));
  const bool asks_for_shards = count(plan, [](const UnitPlan& unit) { return unit.stage >= 2; }) > 0;
  if (any_order && plan.clip && asks_for_shards && !plan.sums_in_backward)
    text +=
        "                  gradients that wait for step() are whole at every stage, since the program may "
        "still read them and add to them\n";
  if (plan.sums_each_backward)
    text +=
        "                  gradients are summed over the ranks in the backward pass of each micro-batch\n";
  return text;
}

std::string device_step_text(const Plan& plan) {
  const DeviceTime& time = plan.device_time;
  const GpuRates& rates = time.rates;
  std::string text = fmt::format(
      "rates             copies of {:.3g} GB/s to the GPU, {:.3g} from it and {:.3g} both ways; the GPU "
      "updates {:.3g} billion elements a second, the CPU's loops move {:.3g} GB/s beside copies{}; all of it "
      "is {}\n",
      rates.in / 1e9, rates.out / 1e9, rates.both / 1e9, 1e-9 / rates.update_seconds, time.cpu_memory / 1e9,
      plan.ranks.by_nccl ? fmt::format(", NCCL carries {:.3g} GB/s to each GPU", rates.between / 1e9)
      : plan.ranks.gpus_meet
          ? fmt::format(", GPUs read {:.3g} GB/s of each other's memory", rates.between / 1e9)
          : "",
      name_of(rates.source));
  text += fmt::format(
      "step              {:.2f} s predicted, bound by {} (the link alone {:.2f} s, updates on the "
      "GPU {:.2f} s, updates on the CPU {:.2f} s",
      time.step, time.bound(), time.link, time.gpu_updates, time.cpu_updates);
  if (plan.uses_disk()) text += fmt::format(", the disk alone {:.2f} s", time.disk);
  if (plan.ranks.size > 1)
    text += fmt::format(", the ranks alone {:.2f} s for {} that are received", time.ranks,
                        format_size(plan.step_bytes_received));
  text += ")\n                  ";
  if (plan.ranks.size > 1 && !plan.knows_link && !plan.ranks.gpus_meet)
    text +=
        "what joins the ranks is not known, so that what is received counts as it is copied in host "
        "memory\n                  ";
  if (!time.computing)
    return text + "computing is the client's, and not known: this is a step that computes nothing\n";
  return text +
         fmt::format("computing, which is the client's, takes {:.2f} s of it, and {:.2f} s are waited for\n",
                     *time.computing, time.wait());
}

// Null: not known before the client has computed. `seconds` are then those of a step that computes nothing.
Json device_step_json(const Plan& plan) {
  const DeviceTime& time = plan.device_time;
  return {{"bytes_in", plan.step_bytes_in},
          {"bytes_out", plan.step_bytes_out},
          {"bytes_read", plan.step_bytes_read},
          {"bytes_written", plan.step_bytes_written},
          {"bytes_received", plan.step_bytes_received},
          {"bytes_received_from_hosts", plan.step_bytes_from_hosts},
          {"compute_seconds", time.computing ? Json(*time.computing) : Json()},
          {"gpu_update_seconds", time.gpu_updates},
          {"cpu_update_seconds", time.cpu_updates},
          {"wait_seconds", time.computing ? Json(time.wait()) : Json()},
          {"disk_seconds", time.disk},
          {"ranks_seconds", time.ranks},
          {"link_seconds", time.link},
          {"seconds", time.step},
          {"least_seconds", time.least()},
          {"bound", time.bound()}};
}

double bytes_per_day(const Plan& plan) {
  return plan.time.step > 0 ? static_cast<double>(plan.step_bytes_written) * 86400 / plan.time.step : 0;
}

// Lists the received bytes by their reason, where there are several.
std::string received_along(const Plan& plan) {
  std::string text;
  const auto add = [&](std::uint64_t bytes, const char* what) {
    if (bytes > 0) text += fmt::format("{} {} {}", text.empty() ? ":" : ",", format_size(bytes), what);
  };
  if (plan.step_bytes_of_data() == plan.step_bytes_received) return text;
  add(plan.step_bytes_of_data(), plan.ranks.together > 1 ? "for parameters and gradients" : "along data");
  add(plan.step_bytes_of_layers, "within layers");
  add(plan.step_bytes_from_sections, "along pipeline");
  return text;
}

}  // namespace

std::string to_text(const Plan& plan, const Profile& profile, const Budget& budget) {
  const bool on_gpu = plan.compute() == Tier::kDevice;
  const auto row = [&](std::string_view name, std::string_view device, std::string_view memory,
                       std::string_view disk) {
    return fmt::format("{:<18}{}{:>14}{:>14}\n", name, on_gpu ? fmt::format("{:>14}", device) : "", memory,
                       disk);
  };
  std::string text = row("", "device", "memory", "disk");
  for (std::size_t p = 0; p < kPurposes; ++p) {
    const auto of = [&](Tier tier) { return plan.bytes[index(tier)][p]; };
    const auto device = of(Tier::kDevice), host = of(Tier::kHost), disk = of(Tier::kDisk);
    if (device + host + disk > 0)
      text += row(name_of(static_cast<Purpose>(p)), cell(device), cell(host), cell(disk));
  }
  text +=
      row("predicted peak", cell(plan.device_bytes), format_size(plan.peak_memory), cell(plan.disk_bytes));
  text += row("budget", cell(budget.device), format_size(budget.memory), cell(budget.disk)) + "\n";
  const std::size_t units = plan.units.size();
  text += fmt::format("{:<18}parameters of {}/{} units, gradients of {}, optimizer state of {}\n",
                      on_gpu ? "on the GPU" : "in memory", count_resident(plan, Part::kParameters), units,
                      count_resident(plan, Part::kGradient), count_resident(plan, Part::kState));
  const auto at_once = [](const UnitPlan& unit) { return !unit.gradient_stored && !unit.gradient_in_shards; };
  if (const std::size_t applied = count(plan, at_once); applied > 0)
    text += fmt::format("applied at once   gradients of {}/{} units: never stored\n", applied, units);
  if (plan.ranks.size > 1) text += ranks_text(plan, profile.any_order);
  text += fmt::format("each parameter    {}, and {:.4g} bytes of optimizer state and master\n",
                      common_dtype(profile), plan.state_bytes_per_parameter);
  text += fmt::format("recomputed        {}\n", common_choice(plan, profile).name);
  text += fmt::format("micro-batches     {} of {} tokens, {} at a time through a unit\n",
                      profile.micro_batches, profile.tokens, plan.group);
  if (plan.uses_disk() || (on_gpu && plan.staging_slots > 0))
    text += fmt::format("ahead             {} accesses, {} staging slots of {} elements\n", plan.prefetch,
                        plan.staging_slots, plan.chunk_elements);
  if (!profile.native_products)
    text += fmt::format(
        "products          {}: operands are widened to f32 for each product\n",
        has_f16(profile) ? "the matrix library has none of f16" : "this CPU has no bf16 instructions");
  if (on_gpu) {
    text += "updated by        " + plan.updates_because + "\n";
    text += fmt::format("moved per step    {} to the GPU, {} from it\n", format_size(plan.step_bytes_in),
                        format_size(plan.step_bytes_out));
    if (plan.uses_disk())
      text += fmt::format("                  {} read from the disk, {} written to it\n",
                          format_size(plan.step_bytes_read), format_size(plan.step_bytes_written));
    return text + device_step_text(plan);
  }
  const std::string apart =
      plan.step_bytes_read_apart == plan.step_bytes_read
          ? ""
          : fmt::format(" (at most {}, where ranks come apart)", format_size(plan.step_bytes_read_apart));
  text += fmt::format("moved per step    {} read{}, {} written ({} written a day)\n",
                      format_size(plan.step_bytes_read), apart, format_size(plan.step_bytes_written),
                      format_size(static_cast<std::uint64_t>(bytes_per_day(plan))));
  if (plan.ranks.size > 1 || profile.whole_step)
    text += fmt::format(
        "received per step {}{} from other ranks{}\n",
        plan.partitions_any(Part::kParameters) || sums_by_rows(profile, plan.ranks) ? "at most " : "",
        format_size(plan.step_bytes_received), received_along(plan));
  if (plan.step_bytes_from_hosts > 0)
    text += fmt::format("                  {} come to its host from other hosts\n",
                        format_size(plan.step_bytes_from_hosts));
  const StepTime& time = plan.time;
  text +=
      fmt::format("step              {:.2f} s predicted, bound by {} (compute {:.2f} s, optimizer {:.2f} s",
                  time.step, plan.bound(), time.compute, time.optimizer);
  if (plan.uses_disk())
    text += fmt::format(", transfers' share of the cores {:.2f} s, waiting {:.2f} s; the disk alone {:.2f} s",
                        time.transfers, time.wait(), time.disk);
  if (time.link > 0) text += fmt::format("; the link alone {:.2f} s", time.link);
  text += ")\n";
  if (plan.ranks.size > 1 && !plan.knows_link)
    text += "the link          is not known, so that what is sent counts as no time; give --link\n";
  return text;
}

Json to_json(const Plan& plan, const Profile& profile, const Budget& budget) {
  Json tiers;
  const bool on_gpu = plan.compute() == Tier::kDevice;
  for (const Tier tier : on_gpu ? std::vector{Tier::kDevice, Tier::kHost, Tier::kDisk}
                                : std::vector(allocator::kTiersOfCpu.begin(), allocator::kTiersOfCpu.end()))
    for (std::size_t p = 0; p < kPurposes; ++p)
      tiers[std::string(name_of(tier))][std::string(name_of(static_cast<Purpose>(p)))] =
          plan.bytes[index(tier)][p];
  const auto place = [](const UnitPlan& unit, Part part) { return place_of(unit.tiers[index(part)]); };
  const auto gradient_place = [&](const UnitPlan& unit) {
    const bool kept = unit.gradient_stored || unit.gradient_in_shards;
    return kept ? place(unit, Part::kGradient) : "none";
  };
  Json units = Json::array();
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    units.push_back({{"name", profile.units[u].name},
                     {"dtype", name_of(profile.units[u].dtype)},
                     {"parameters", place(plan.units[u], Part::kParameters)},
                     {"gradient", gradient_place(plan.units[u])},
                     {"state", place(plan.units[u], Part::kState)},
                     {"recompute", profile.unit_profiles[u].choices[plan.units[u].choice].name}});
    if (on_gpu) units.back()["updated_by"] = plan.units[u].updated_by_cpu() ? "cpu" : "gpu";
    if (plan.ranks.size > 1) units.back()["stage"] = plan.units[u].stage;
    if (plan.units[u].tier(Part::kParameters) == Tier::kRanks)
      units.back()["shard"] = place_of(plan.units[u].shard_on_disk    ? Tier::kDisk
                                       : plan.units[u].shard_on_gpu() ? Tier::kDevice
                                                                      : Tier::kHost);
  }
  Json json = {{"dtype", common_dtype(profile)},
               {"bytes", tiers},
               {"predicted_peak", plan.peak_memory},
               {"disk", plan.disk_bytes},
               {"budget", {{"memory", budget.memory}, {"disk", budget.disk}}},
               {"state_bytes_per_parameter", plan.state_bytes_per_parameter},
               {"ranks", plan.ranks.size},
               {"rank", plan.ranks.rank},
               {"stage", plan.one_stage() ? Json(*plan.one_stage()) : Json()},
               {"group", plan.group},
               {"micro_batches", profile.micro_batches},
               {"prefetch", plan.prefetch},
               {"chunk_elements", plan.chunk_elements},
               {"staging_slots", plan.staging_slots},
               {"recompute", common_choice(plan, profile).name},
               {"native_products", profile.native_products},
               {"step",
                {{"bytes_read", plan.step_bytes_read},
                 {"bytes_written", plan.step_bytes_written},
                 {"bytes_written_per_day", bytes_per_day(plan)},
                 {"bytes_received", plan.step_bytes_received},
                 {"bytes_received_from_hosts", plan.step_bytes_from_hosts},
                 {"compute_seconds", plan.time.compute},
                 {"optimizer_seconds", plan.time.optimizer},
                 {"transfer_seconds", plan.time.transfers},
                 {"wait_seconds", plan.time.wait()},
                 {"disk_seconds", plan.time.disk},
                 {"link_seconds", plan.time.link},
                 {"seconds", plan.time.step},
                 {"bound", plan.bound()}}},
               {"units", units}};
  if (profile.whole_step || plan.ranks.together > 1) {
    Json& along = json["step"]["bytes_received_along"];
    along["data"] = plan.step_bytes_of_data();
    if (profile.whole_step) along["pipeline"] = plan.step_bytes_from_sections;
    if (plan.ranks.together > 1) along["layers"] = plan.step_bytes_of_layers;
  }
  if (on_gpu) json["step"] = device_step_json(plan);
  if (plan.ranks.size > 1) {
    json["step"]["bytes_read_apart"] = plan.step_bytes_read_apart;
    json["sums_in_backward"] = plan.sums_in_backward;
  }
  if (!on_gpu) return json;
  json["device"] = plan.device_bytes;
  json["updated_by"] = plan.updates_because;
  json["budget"]["device"] = budget.device;
  json["rates"] = to_json(plan.device_time.rates, plan.device_time.cpu_memory);
  if (plan.ranks.size > 1)
    json["links"] = plan.ranks.by_nccl ? "nccl" : plan.ranks.gpus_meet ? "gpus" : "host";
  json["passes_shards"] = plan.shard_place() == ShardPlace::kPassed;
  return json;
}

}  // namespace sluice::engine
