#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/run/trainer.h"

namespace sluice::models {

// What the defaults of a recipe follow from. docs/optimizers.md has the rule and where it is from.
struct RecipeBasis {
  double block_parameters = 0;  // without embeddings and head
  bool first_values = true;     // else the weights of a folder, which take a tenth of the learning rate
};

// Takes each setting of a recipe from the user, else from the checkpoint that the run goes on from (`record`:
// what run_record() made, `source`: its folder), else from the defaults. Throws Error(kInvalidArgument) where
// settings contradict each other, or the record is none.
Recipe make_recipe(const TrainSettings& settings, const RecipeBasis& basis, const Json* record = nullptr,
                   const std::string& source = "");

// The recipe under the command line's names.
Json to_json(const Recipe& recipe);
// The recipe in a few lines for people.
std::string to_text(const Recipe& recipe, const TrainSettings& settings, const RecipeBasis& basis);

}  // namespace sluice::models
