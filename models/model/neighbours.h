#pragma once
#include <cstddef>
#include <span>

#include "engine/plan/pipeline.h"

namespace sluice::models {

// How a section of a pipeline gets inputs and gradients from the sections beside it, and gives them its own.
// Messages of a kind and chunk come in the order of items. Thread rule: one thread.
class Neighbours {
 public:
  virtual ~Neighbours() = default;
  // Begins a receive into these bytes, or a send from them. They stay valid, and are not touched, until
  // await() has returned for the same action.
  virtual void begin(const engine::Action& message, std::span<std::byte> bytes) = 0;
  // Waits for what was begun. Throws what kept it from coming.
  virtual void await(const engine::Action& message) = 0;
};

// Which section of a pipeline is run. Without sections beside it, it is the whole model.
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
