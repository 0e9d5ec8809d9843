#include "engine/checkpoint/best_checkpoint.h"

#include <cmath>

namespace sluice::engine {
namespace {

constexpr const char* kField = "validation";

// Null where there is no loss. A folder may hold what other programs wrote.
Json validation_of(const Json& run_record) {
  const Json found = run_record.is_object() ? run_record.value(kField, Json()) : Json();
  return found.is_object() && found.value("loss", Json()).is_number() ? found : Json();
}

bool have_one_judge(Json a, Json b) {
  a.erase("loss");
  b.erase("loss");
  return a == b;
}

}  // namespace

Json validation_record(double loss, const Json& judge) {
  Json record = judge;
  record["loss"] = std::isfinite(loss) ? Json(loss) : Json();
  return record;
}

std::optional<double> validation_loss_of(const Json& run_record) {
  const Json found = validation_of(run_record);
  return found.is_null() ? std::nullopt : std::optional(found.at("loss").get<double>());
}

std::optional<BestCheckpoint> best_checkpoint(const CheckpointList& list) {
  std::optional<BestCheckpoint> best;
  Json newest;
  for (auto at = list.whole.rbegin(); at != list.whole.rend(); ++at) {
    const Json found = validation_of(at->run);
    if (found.is_null()) continue;
    if (newest.is_null()) newest = found;
    const auto loss = found.at("loss").get<double>();
    if (have_one_judge(found, newest) && (!best || loss <= best->validation_loss))
      best = {at->step, at->path, loss};
  }
  return best;
}

bool was_judged_otherwise(const CheckpointList& list, const Json& judge) {
  for (const auto& whole : list.whole) {
    const Json found = validation_of(whole.run);
    if (!found.is_null() && !have_one_judge(found, judge)) return true;
  }
  return false;
}

}  // namespace sluice::engine
