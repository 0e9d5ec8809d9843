#include "engine/plan/profile.h"

#include <algorithm>
#include <utility>

namespace sluice::engine {

Profile any_order_profile(std::vector<UnitSpec> units, std::size_t held_units, Dtype dtype) {
  Profile profile;
  profile.units = std::move(units);
  profile.any_order = true;
  profile.held_units = held_units;
  profile.dtype = dtype;
  profile.unit_profiles.resize(profile.units.size());
  for (UnitProfile& unit : profile.unit_profiles) unit.choices = {{"none", 0, 0, 0}};
  const auto count = static_cast<UnitId>(profile.units.size());
  for (UnitId unit = 0; unit < count; ++unit) profile.schedule.push_back({unit, true, -1, false});
  for (UnitId unit = count; unit-- > 0;) profile.schedule.push_back({unit, true, 0, true});
  return profile;
}

std::vector<int> gradient_uses(const Profile& profile) {
  std::vector<int> uses(profile.units.size());
  for (const Access& access : profile.schedule)
    if (access.gradient_use >= 0)
      for (const ParameterSpec& parameter : profile.units[access.unit].parameters)
        uses[access.unit] = std::max(uses[access.unit], parameter.uses);
  return uses;
}

}  // namespace sluice::engine
