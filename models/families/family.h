#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "engine/layout/layout.h"
#include "models/families/builder.h"
#include "models/families/config.h"
#include "models/families/config_reader.h"

namespace sluice::models {

struct Preset {
  const char* name;
  ModelConfig config;
};

// The values that a parameter begins with: normally distributed, or all the mean where the deviation is 0.
struct FirstValues {
  float mean = 0, deviation = 0;
};

// What models of one model_type have for their own, which the rest of the room gets from here. A family is a
// constant of its own file, and a line in families.cc.
struct Family {
  std::string_view model_type;    // in a config.json
  std::string_view architecture;  // there, too: the class that transformers has for it
  std::vector<Preset> (*presets)();

  // Reads what a config.json states and not all families have. Throws what config_from_hugging_face() does.
  ModelConfig (*read)(const ConfigReader& reader);
  Json (*write)(const ModelConfig& config);  // what read() reads
  void (*check)(const ModelConfig& config);  // throws for what this family lacks
  Architecture (*build)(const Shape& shape);
  FirstValues (*first_values)(const ModelConfig& config, const engine::ParameterSpec& parameter);

  std::string_view prefix;  // of the names of parameters, which files may leave out
  std::string_view table;   // the embedding, and the weight of a tied head
  std::string_view head;    // the weight of a head that is not tied; files may have a tied one, too
  std::span<const std::string_view> buffers;  // how the names of tensors end that are no parameters
};

// Norms are one, biases zero, the rest is normal with the deviation initializer_range.
FirstValues usual_first_values(const ModelConfig& config, const engine::ParameterSpec& parameter);

}  // namespace sluice::models
