#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/run/trainer.h"

namespace sluice::models {

// The inputs of a recipe's defaults. docs/optimizers.md has the rule and its sources.
struct RecipeBasis {
  double block_parameters = 0;  // without embeddings and head
  bool first_values = true;     // false: weights of a folder, for which the learning rate is a tenth
};

// Takes each setting of a recipe from the user, else from the checkpoint that the run resumes (`record`: its
// run_record(), `source`: its folder), else from the defaults. Throws Error(kInvalidArgument) for
// contradictory settings and for an invalid record.
Recipe make_recipe(const TrainSettings& settings, const RecipeBasis& basis, const Json* record = nullptr,
                   const std::string& source = "");

// Returns the recipe under the command line's names.
Json to_json(const Recipe& recipe);
// Describes the recipe in a few lines for people.
std::string to_text(const Recipe& recipe, const TrainSettings& settings, const RecipeBasis& basis);

}  // namespace sluice::models
