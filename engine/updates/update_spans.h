#pragma once
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/layout/state_format.h"
#include "engine/updates/update_executor.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Describes works to the optimizer. Both arguments outlive it. Thread rule: it never changes.
class UpdateSpans {
 public:
  UpdateSpans(const Layout& layout, const StateFormat& format) : layout_(layout), format_(format) {}
  bool is_updated(const Update& update, ParameterId parameter) const;
  optim::Hyperparameters hyperparameters_of(const Update& update, ParameterId parameter) const;
  // The memory of a slice: what the chunk's work has of its parameter.
  optim::Span span_of(const ChunkWork& work, const Slice& slice) const;

 private:
  const Layout& layout_;
  const StateFormat& format_;
};

}  // namespace sluice::engine
