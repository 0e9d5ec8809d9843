#include "engine/steps/step_of_ranks.h"

#include <algorithm>

#include "core/json.h"
#include "engine/steps/refusal.h"

namespace sluice::engine {

std::string text_of(const StepSettings& settings) {
  Json groups = Json::array();
  for (const GroupSettings& group : settings.groups) {
    groups.push_back({{"learning_rate", group.learning_rate}, {"weight_decay", group.weight_decay}});
    if (group.settings != nullptr) groups.back()["settings"] = group.settings->to_json();
  }
  return Json{{"clip", settings.clip},
              {"gradient_factor", settings.gradient_factor},
              {"keep_gradients", settings.keep_gradients},
              {"clip_value", settings.clip_value},
              {"groups", groups}}
      .dump();
}

void require_alike(const Layout& layout, const std::vector<StepOfRank>& ranks) {
  const StepOfRank& first = ranks.front();
  const StepOfRank* steps = nullptr;  // the first one that reports settings
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const StepOfRank& other = ranks[rank];
    if (other.step != first.step)
      refuse(ErrorCode::kState, "rank {} is in step {}, and rank 0 is in step {}; begin all at the same step",
             rank, other.step, first.step);
    for (UnitId unit = 0; unit < std::min(first.edits.size(), other.edits.size()); ++unit)
      if (other.edits[unit] != first.edits[unit])
        refuse(ErrorCode::kState,
               "unit '{}' was edited {} times on rank {}, and {} times on rank 0; edit it alike on all ranks",
               layout.units()[unit].name, other.edits[unit], rank, first.edits[unit]);
    if (other.settings.empty()) continue;
    if (steps != nullptr && other.settings != steps->settings)
      refuse(ErrorCode::kState,
             "rank {} steps with {}, and rank {} with {}; give all ranks the same settings", rank,
             other.settings, steps - ranks.data(), steps->settings);
    if (steps == nullptr) steps = &other;
  }
}

}  // namespace sluice::engine
