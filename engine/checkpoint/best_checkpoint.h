#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/json.h"
#include "engine/checkpoint/checkpoint.h"

// Which checkpoint of a run is the best by validation: see docs/formats/checkpoint.md. It follows from what
// the checkpoints of a folder record, and from nothing else.
namespace sluice::engine {

struct BestCheckpoint {
  std::uint64_t step = 0;
  std::string folder;
  double validation_loss = 0;
};

// What a checkpoint records of its validation: `judge` says by what it was judged (data and number of
// batches), and losses of different judges are never compared. A loss that is not finite is recorded as none.
Json validation_record(double loss, const Json& judge);

// The least validation loss that checkpoints record, of equal ones the oldest, among those with the judge of
// the newest that records one. Nothing where none does.
std::optional<BestCheckpoint> best_checkpoint(const CheckpointList& list);
// The validation loss that one records, whoever judged it.
std::optional<double> validation_loss_of(const Json& run_record);
// Whether a checkpoint of the list has a loss of another judge.
bool was_judged_otherwise(const CheckpointList& list, const Json& judge);

}  // namespace sluice::engine
