#include "models/families/family.h"

namespace sluice::models {

FirstValues usual_first_values(const ModelConfig& config, const engine::ParameterSpec& parameter) {
  if (parameter.name.ends_with(".bias")) return {0, 0};
  if (parameter.shape.size() == 1 && parameter.name.ends_with(".weight")) return {1, 0};
  return {0, config.initializer_range};
}

}  // namespace sluice::models
