#include "engine/plan/profile.h"

#include <algorithm>

namespace sluice::engine {

std::vector<int> gradient_uses(const Profile& profile) {
  std::vector<int> uses(profile.units.size());
  for (const Access& access : profile.schedule)
    if (access.gradient_use >= 0)
      for (const ParameterSpec& parameter : profile.units[access.unit].parameters)
        uses[access.unit] = std::max(uses[access.unit], parameter.uses);
  return uses;
}

}  // namespace sluice::engine
