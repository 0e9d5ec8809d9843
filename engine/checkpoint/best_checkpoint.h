#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/json.h"
#include "engine/checkpoint/checkpoint.h"

// Finds the best checkpoint of a run by validation, from what the checkpoints of its folder record and
// nothing else: see docs/formats/checkpoint.md.
namespace sluice::engine {

struct BestCheckpoint {
  std::uint64_t step = 0;
  std::string folder;
  double validation_loss = 0;
};

// Returns the record of a validation, which a checkpoint contains. `judge` identifies the data and the number
// of batches; losses of different judges are never compared. A loss that is not finite is recorded as none.
Json validation_record(double loss, const Json& judge);

// Returns the checkpoint with the least validation loss (the oldest of equal ones) among those with the judge
// of the newest one that has a loss; nullopt where none has a loss.
std::optional<BestCheckpoint> best_checkpoint(const CheckpointList& list);
// The validation loss in a checkpoint's record, whatever its judge.
std::optional<double> validation_loss_of(const Json& run_record);
// Whether a checkpoint of the list has a loss of another judge.
bool was_judged_otherwise(const CheckpointList& list, const Json& judge);

}  // namespace sluice::engine
