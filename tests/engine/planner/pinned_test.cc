#include <fmt/format.h>

#include <ranges>

#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "engine/plan/plan.h"
#include "engine/planner/planner.h"
#include "source_folder.h"
#include "testing.h"

// Each file in pinned/ has what a plan is made from, and the plan, of which numbers that are 0 are left out.
// What "like" names is in pinned_parts.json, and what stands beside "like" is instead of what that has. To
// change plans on purpose, run these tests with SLUICE_PIN_PLANS=1, which writes the files anew; the commit
// then shows the difference.
namespace sluice::engine::pinned_test {

const std::filesystem::path kFolder =
    std::filesystem::path(test::kSourceFolder) / "tests/engine/planner/pinned";
const std::filesystem::path kShared = kFolder.parent_path() / "pinned_parts.json";
constexpr std::size_t kWidth = 160;  // the longest line of a file

template <class T>
T field(const Json& object, const char* key, T otherwise) {
  return object.contains(key) ? json_field<T>(object, key, "a pinned plan") : otherwise;
}

// Puts what "like" names in its place.
Json whole(const Json& given, const Json& parts) {
  if (!given.is_structured()) return given;
  Json made = given;
  for (Json& part : made) part = whole(part, parts);
  if (!given.is_object() || !given.contains("like")) return made;
  made.erase("like");
  Json like = whole(parts.at(given.at("like").get<std::string>()), parts);
  like.merge_patch(made);
  return like;
}

Dtype type_of(const Json& object) { return *dtype_from_name(field<std::string>(object, "type", "f32")); }

Work work_of(const Json& object) {
  return {field(object, "products", std::vector<double>()), field(object, "attention", 0.0),
          field(object, "bytes", 0.0)};
}

kernels::Product product_of(const Json& object) {
  kernels::Product product;
  product.m = object.at("m");
  product.n = object.at("n");
  product.k = object.at("k");
  product.a.type = product.b.type = product.c.type = type_of(object);
  product.transpose_a = field(object, "transpose_a", false);
  product.transpose_b = field(object, "transpose_b", false);
  product.accumulate = field(object, "accumulate", false);
  return product;
}

ParameterSpec parameter_of(const Json& object, const std::string& unit) {
  ParameterSpec parameter{.name = unit + "." + object.at("name").get<std::string>(),
                          .shape = object.at("shape").get<std::vector<std::size_t>>(),
                          .uses = field(object, "uses", 1),
                          .by_elements = field(object, "by_elements", false)};
  return parameter;
}

UnitProfile unit_profile_of(const Json& object) {
  UnitProfile profile;
  profile.forward = work_of(field(object, "forward", Json::object()));
  profile.backward = work_of(field(object, "backward", Json::object()));
  profile.input_bytes = field<std::size_t>(object, "input_bytes", 0);
  for (const Json& choice : field(object, "choices", Json::array({{{"name", "none"}}})))
    profile.choices.push_back(
        {choice.at("name"), field<std::size_t>(choice, "kept_bytes", 0),
         work_of(field(choice, "again", Json::object())), field<std::size_t>(choice, "workspace_bytes", 0),
         field<std::size_t>(choice, "forward_steps", 1), field<std::size_t>(choice, "backward_steps", 1)});
  return profile;
}

// "repeat" makes so many units; "span_elements" cuts the unit's only parameter into spans.
void add_units(const Json& object, Profile& profile) {
  const auto spans = field<std::size_t>(object, "span_elements", 0);
  const std::string name = object.at("name");
  std::size_t repeat = field<std::size_t>(object, "repeat", 1);
  if (spans > 0)
    repeat = divide_up(parameter_of(object.at("parameters").at(0), name).whole_elements(), spans);
  for (std::size_t i = 0; i < repeat; ++i) {
    UnitSpec unit;
    unit.name = repeat > 1 ? fmt::format("{}.{}", name, i) : name;
    unit.trainable = field(object, "trainable", true);
    unit.dtype = type_of(object);
    for (const Json& parameter : object.at("parameters"))
      unit.parameters.push_back(parameter_of(parameter, spans > 0 ? name : unit.name));
    if (spans > 0) {
      ParameterSpec& span = unit.parameters.front();
      span.span_first = i * spans;
      span.span_elements = std::min(spans, span.whole_elements() - span.span_first);
    }
    profile.units.push_back(std::move(unit));
    profile.unit_profiles.push_back(unit_profile_of(object));
  }
}

// All units are used forward, and then backward. A tied unit has its gradient of use 0 before the others,
// like a model's head, and that of use 1 after them.
std::vector<Access> schedule_of(const std::vector<UnitSpec>& units, bool reads) {
  std::vector<Access> schedule;
  const auto is_tied = [&](UnitId unit) { return units[unit].parameters.front().uses > 1; };
  const auto count = static_cast<UnitId>(units.size());
  for (UnitId unit = 0; unit < count; ++unit) schedule.push_back({unit, true, -1, false});
  if (reads) return schedule;
  for (UnitId unit = 0; unit < count; ++unit)
    if (is_tied(unit)) schedule.push_back({unit, true, 0, false});
  for (UnitId unit = count; unit-- > 0;)
    if (!is_tied(unit)) {
      const bool trainable = units[unit].trainable;
      schedule.push_back({unit, true, trainable ? 0 : -1, trainable});
    }
  for (UnitId unit = count; unit-- > 0;)
    if (is_tied(unit)) schedule.push_back({unit, false, 1, true});
  return schedule;
}

Profile profile_of(const Json& object) {
  Profile profile;
  for (const Json& unit : object.at("units")) add_units(unit, profile);
  for (const Json& product : field(object, "products", Json::array()))
    profile.products.push_back(product_of(product));
  if (field(object, "any_order", false)) {
    const std::vector<UnitProfile> computed = profile.unit_profiles;
    profile = any_order_profile(profile.units, field<std::size_t>(object, "held_units", 1));
    profile.unit_profiles = computed;
  } else {
    profile.schedule = schedule_of(profile.units, field(object, "reads", false));
  }
  profile.micro_batches = field<std::size_t>(object, "micro_batches", 1);
  profile.tokens = field<std::size_t>(object, "tokens", 0);
  profile.border_gradient_bytes = field<std::size_t>(object, "border_gradient_bytes", 0);
  profile.workspace_bytes = field<std::size_t>(object, "workspace_bytes", 0);
  profile.hidden_bytes = field<std::size_t>(object, "hidden_bytes", 0);
  return profile;
}

std::unique_ptr<optim::Optimizer> optimizer_of(const Json& object) {
  optim::OptimizerSettings settings;
  settings.name = object.at("name");
  for (const char* const key : {"beta1", "momentum"})
    if (object.contains(key)) settings.settings[key] = object.at(key);
  settings.storage.state = type_of(object);
  settings.storage.master = field(object, "master", true);
  return optim::make_optimizer(settings);
}

template <class T>
std::optional<T> asked(const Json& object, const char* key) {
  return object.contains(key) ? std::optional<T>(object.at(key).get<T>()) : std::nullopt;
}

PlanRequest request_of(const Json& object) {
  PlanRequest request;
  request.clip = field(object, "clip", true);
  request.recompute = asked<std::string>(object, "recompute");
  request.group = asked<std::size_t>(object, "group");
  request.prefetch = asked<std::size_t>(object, "prefetch");
  request.chunk_elements = asked<std::size_t>(object, "chunk_elements");
  const char* const parts[] = {"parameters", "gradients", "state"};
  for (std::size_t part = 0; part < kParts; ++part)
    if (const auto place = asked<std::string>(object, parts[part]))
      request.places[part] = tier_of_place(*place);
  request.trains = field(object, "trains", true);
  request.computing = asked<double>(object, "computing");
  if (const auto updates = asked<std::string>(object, "updates")) request.updates = tier_of_place(*updates);
  return request;
}

MachineRates rates_of(const Json& object) {
  MachineRates rates;
  rates.are_limits = field(object, "are_limits", false);
  for (const Json& product : field(object, "products", Json::array()))
    rates.products.push_back({product_of(product), product.at("flops")});
  rates.flops = field(object, "flops", rates.flops);
  rates.attention = asked<double>(object, "attention");
  rates.memory_bandwidth = field(object, "memory_bandwidth", rates.memory_bandwidth);
  rates.update_seconds = asked<double>(object, "update_seconds");
  rates.disk_read = field(object, "disk_read", rates.disk_read);
  rates.disk_write = field(object, "disk_write", rates.disk_write);
  rates.disk_together = field(object, "disk_together", rates.disk_together);
  rates.disk_processor_seconds = field(object, "disk_processor_seconds", rates.disk_processor_seconds);
  rates.cores = field(object, "cores", rates.cores);
  if (object.contains("gpu")) {
    const Json& gpu = object.at("gpu");
    rates.gpu = {Source::kStated, gpu.at("in"), gpu.at("out"), gpu.at("both"),
                 1 / gpu.at("updates").get<double>()};
  }
  return rates;
}

// Rounds to nine digits, which are the same with another compiler.
void round_numbers(Json& json) {
  if (json.is_number_float()) json = std::stod(fmt::format("{:.9g}", json.get<double>()));
  if (json.is_structured())
    for (Json& part : json) round_numbers(part);
}

void leave_out_zeros(Json& json) {
  if (!json.is_structured()) return;
  for (auto at = json.begin(); at != json.end();) {
    leave_out_zeros(*at);
    at = json.is_object() && (*at == 0 || *at == Json::object()) ? json.erase(at) : std::next(at);
  }
}

// Consecutive units with the same plan are one entry.
Json shortened(Json plan) {
  round_numbers(plan);
  Json units = Json::array();
  for (Json unit : plan.at("units")) {
    const std::string name = unit.at("name");
    unit.erase("name");
    if (!units.empty() && units.back().at("each") == unit)
      units.back()["last"] = name;
    else
      units.push_back({{"each", unit}, {"first", name}, {"last", name}});
  }
  plan["units"] = units;
  leave_out_zeros(plan);
  return plan;
}

// Returns the plan, or the text of its refusal.
Json planned(const Json& written) {
  const Json file = whole(written, read_json_file(kShared));
  const Profile profile = profile_of(file.at("profile"));
  Budget budget;
  budget.memory = parse_size(file.at("budget").at("memory").get<std::string>());
  budget.disk = parse_size(file.at("budget").at("disk").get<std::string>());
  budget.base = parse_size(file.at("budget").at("base").get<std::string>());
  budget.device = parse_size(field<std::string>(file.at("budget"), "device", "0"));
  budget.device_base = parse_size(field<std::string>(file.at("budget"), "device_base", "0"));
  try {
    return shortened(to_json(make_plan(profile, *optimizer_of(file.at("optimizer")), budget,
                                       request_of(file.at("request")), rates_of(file.at("rates"))),
                             profile, budget));
  } catch (const Error& error) {
    return {{"refused", error.what()}};
  }
}

// Puts what fits into a line in one line.
std::string lines_of(const Json& json, std::size_t indent) {
  std::string flat = json.dump();
  if (!json.is_structured() || indent + flat.size() <= kWidth) return flat;
  const std::string margin(indent + 1, ' ');
  std::string text = json.is_array() ? "[" : "{";
  const char* separator = "";
  for (const auto& [key, value] : json.items()) {
    const std::string name = json.is_array() ? "" : Json(key).dump() + ": ";
    text += std::string(separator) + "\n" + margin + name + lines_of(value, indent + 1);
    separator = ",";
  }
  return text + "\n" + std::string(indent, ' ') + (json.is_array() ? "]" : "}");
}

std::string differences(const Json& before, const Json& now) {
  std::string text;
  for (const Json& change : Json::diff(before, now)) {
    const Json::json_pointer at(change.at("path").get<std::string>());
    text += fmt::format("{}: {} was pinned, {} is planned\n", change.at("path").get<std::string>(),
                        before.contains(at) ? before.at(at).dump() : "nothing",
                        now.contains(at) ? now.at(at).dump() : "nothing");
  }
  return text;
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder))
    all.push_back(entry.path().stem().string());
  std::ranges::sort(all);
  return all;
}

class PinnedPlans : public testing::TestWithParam<std::string> {};

TEST_P(PinnedPlans, AreMadeAgain) {
  const std::filesystem::path path = kFolder / (GetParam() + ".json");
  Json file = read_json_file(path);
  const Json plan = planned(file);
  if (std::getenv("SLUICE_PIN_PLANS") != nullptr) {
    file["plan"] = plan;
    std::ofstream(path) << lines_of(file, 0) << "\n";
    return;
  }
  const Json pinned = field(file, "plan", Json::object());
  EXPECT_EQ(pinned, plan) << differences(pinned, plan)
                          << "Where that is meant, run this test with SLUICE_PIN_PLANS=1, which pins " << path
                          << " anew.";
}

INSTANTIATE_TEST_SUITE_P(Files, PinnedPlans, testing::ValuesIn(names()),
                         [](const auto& file) { return file.param; });

}  // namespace sluice::engine::pinned_test
