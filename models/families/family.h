#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "engine/layout.h"
#include "models/families/builder.h"
#include "models/families/config.h"
#include "models/families/config_reader.h"

namespace sluice::models {

struct Preset {
  const char* name;
  ModelConfig config;
};

// Values that a parameter begins with: normal ones, or with no deviation all the mean.
struct FirstValues {
  float mean = 0, deviation = 0;
};

// What models of one model_type have for their own: everything else of this room asks here. An entry is a
// constant of its family's file, and a line in families.cc.
struct Family {
  std::string_view model_type;    // in a config.json
  std::string_view architecture;  // there, too: the class that transformers has for it
  std::vector<Preset> (*presets)();

  // The sizes that a config.json states; throws as config_from_hugging_face(). What all families have is read
  // by that.
  ModelConfig (*read)(const ConfigReader& reader);
  Json (*write)(const ModelConfig& config);  // what read() reads
  void (*check)(const ModelConfig& config);  // throws as check_config(), for what all may have but this one
  Architecture (*build)(const Shape& shape);
  FirstValues (*first_values)(const ModelConfig& config, const engine::ParameterSpec& parameter);

  std::string_view prefix;  // of the names of parameters, which files may leave out
  std::string_view table;   // the embedding; where the head is tied, its weight, too
  std::string_view head;    // the weight of a head that is not tied; files may also have a tied one by it
  std::span<const std::string_view> buffers;  // ends of the names of tensors in files that are no parameters
};

// Norms are one, biases zero, the rest is normal with the deviation initializer_range.
FirstValues usual_first_values(const ModelConfig& config, const engine::ParameterSpec& parameter);

}  // namespace sluice::models
