#pragma once
#include <functional>
#include <vector>

#include "engine/updates/update_pipeline.h"

// Private to UpdatePipeline.
namespace sluice::engine {

// An update in progress, or one that is only foreseen.
struct UpdatePipeline::Running {
  Update update;
  std::function<void()> on_applied;
  std::vector<Bucket> buckets;
  std::size_t index = 0;  // the current bucket
  // The bucket's current round, or the application; in a joint update the only one of the pass.
  int round = 0;
  std::size_t next_read = 0, next_work = 0;  // the next chunk to read, and to give to the executor
  std::size_t works = 0;                     // that the executor has begun and not ended
  std::size_t writes = 0;  // chunks whose write has not ended, or begins when their work ends
  bool reported = false;
  bool decided = false;   // add() was called; else it is only foreseen
  bool streamed = false;  // it needs slots; else gradient and state are in memory
  const Bucket& bucket() const { return buckets[index]; }
  bool applies() const { return round == bucket().rounds; }
  bool given() const { return index == buckets.size(); }  // the executor was given all of it
  bool applied() const { return given() && works == 0; }
  bool done() const { return reported && writes == 0; }
};

}  // namespace sluice::engine
