#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/plan/pipeline.h"

namespace sluice::engine {

// simulate() for many seconds of one pipeline. In which order actions go on, and what each waits for, does
// not depend on how long they take, and is found once.
class PipelineClock {
 public:
  explicit PipelineClock(const Pipeline& pipeline);
  // PipelineTime::step.
  double step(std::span<const SectionSeconds> seconds) const;

  // An action that goes on, in the order of all sections. Messages are numbered.
  struct Event {
    std::uint32_t section = 0, chunk = 0;  // the chunk: by its number in the model
    Action::Kind kind = Action::Kind::kForward;
    std::uint32_t message = 0;  // of a send or receive
    std::uint32_t awaited[2] = {};
    std::uint32_t count = 0;  // of those that it awaits
  };

 private:
  const Pipeline pipeline_;
  std::vector<Event> events_;
};

}  // namespace sluice::engine
