#pragma once
#include <cstddef>
#include <span>

#include "engine/plan/pipeline.h"

namespace sluice::models {

// A pipeline section's messages with its neighbour sections: activations and gradients. Messages of one kind
// and chunk come in the order of items. Thread rule: one thread.
class Neighbours {
 public:
  virtual ~Neighbours() = default;
  // Begins to receive into these bytes, or to send them. They stay valid and untouched until await() has
  // returned for the same action.
  virtual void begin(const engine::Action& message, std::span<std::byte> bytes) = 0;
  // Waits for the message that was begun. Throws the error that prevented it.
  virtual void await(const engine::Action& message) = 0;
};

// The section of a pipeline that is run; by default the whole model.
struct Place {
  engine::Pipeline pipeline;
  int section = 0;
  Neighbours* neighbours = nullptr;  // REQUIRES: not null where there are other sections

  bool is_first() const { return section == 0; }
  bool is_last() const { return section + 1 == pipeline.sections; }
  // Whether the section's chunk is the model's first or last one.
  bool begins(std::size_t chunk) const { return pipeline.begins(section, chunk); }
  bool ends(std::size_t chunk) const { return pipeline.ends(section, chunk); }
};

}  // namespace sluice::models
