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

// The initial values of a parameter: normally distributed, or all equal to the mean where the deviation is 0.
struct FirstValues {
  float mean = 0, deviation = 0;
};

// The properties of models of one model_type, which the rest of the room gets from here. A family is a
// constant in its own file, and a line in families.cc.
struct Family {
  std::string_view model_type;    // in a config.json
  std::string_view architecture;  // in a config.json, too: transformers' class for it
  std::vector<Preset> (*presets)();

  // Reads the keys of a config.json that not all families have. Throws as config_from_hugging_face().
  ModelConfig (*read)(const ConfigReader& reader);
  Json (*write)(const ModelConfig& config);  // writes the keys that read() reads
  void (*check)(const ModelConfig& config);  // throws for a configuration that this family does not support
  Architecture (*build)(const Shape& shape);
  FirstValues (*first_values)(const ModelConfig& config, const engine::ParameterSpec& parameter);

  std::string_view prefix;  // of parameter names; files may omit it
  std::string_view table;   // the embedding's table, also the weight of a tied head
  std::string_view head;    // the weight of an untied head; files may also contain a tied one
  std::span<const std::string_view> buffers;  // name endings of tensors that are no parameters
};

// The default initialization: norms are one, biases zero, all else is normal with the deviation
// initializer_range.
FirstValues usual_first_values(const ModelConfig& config, const engine::ParameterSpec& parameter);

}  // namespace sluice::models
