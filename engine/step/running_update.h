#pragma once
#include <functional>
#include <vector>

#include "engine/step/update_pipeline.h"

// Private to UpdatePipeline.
namespace sluice::engine {

// An update on its way, or one that was foreseen.
struct UpdatePipeline::Running {
  Update update;
  std::function<void()> on_applied;
  std::vector<Batch> batches;
  std::size_t index = 0;                     // of the batch
  int round = 0;                             // the batch's own, and then the application; of a pass its only
  std::size_t next_read = 0, next_work = 0;  // chunks of this pass
  std::size_t works = 0;                     // that the executor has and has not done
  std::size_t writes = 0;                    // chunks whose write has not ended, or is still to begin
  bool reported = false;
  bool decided = false;   // else it was only foreseen
  bool streamed = false;  // through slots; else all its parts are in memory
  const Batch& batch() const { return batches[index]; }
  bool applies() const { return round == batch().rounds; }
  bool given() const { return index == batches.size(); }  // all of it, to the executor
  bool applied() const { return given() && works == 0; }
  bool done() const { return reported && writes == 0; }
};

}  // namespace sluice::engine
