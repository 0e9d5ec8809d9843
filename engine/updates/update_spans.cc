#include "engine/updates/update_spans.h"

namespace sluice::engine {

bool UpdateSpans::is_updated(const Update& update, ParameterId parameter) const {
  return update.parameter_updates[parameter - layout_.first_parameter(update.unit)].step > 0;
}

optim::Hyperparameters UpdateSpans::hyperparameters_of(const Update& update, ParameterId parameter) const {
  const ParameterUpdate& own = update.parameter_updates[parameter - layout_.first_parameter(update.unit)];
  optim::Hyperparameters hyperparameters = update.groups[layout_.spec(parameter).group];
  hyperparameters.step = own.step;
  hyperparameters.gradient_factor *= own.gradient_factor;
  return hyperparameters;
}

optim::Span UpdateSpans::span_of(const ChunkWork& work, const Slice& slice) const {
  const UnitId unit = work.update.unit;
  const auto part = [&](std::size_t array) {
    if (!format_.has(array, slice.parameter)) return optim::StatePart{};
    return format_.part(work.state, unit, *work.chunk, array, slice.in_chunk);
  };
  optim::Span span;
  span.count = slice.count;
  span.first_index = layout_.spec(slice.parameter).span_first + slice.first;
  span.parameter_index = layout_.logical_index(slice.parameter);
  Array values = work.parameters;
  if (values.data != nullptr)
    values = values.at(layout_.location(slice.parameter).offset + slice.first - work.first_parameter);
  if (values.type != Dtype::kF32) span.parameter = values;
  if (format_.has_master(unit))
    span.master = part(0).values.f32();
  else if (values.type == Dtype::kF32)
    span.master = values.f32();
  span.gradient = work.gradient.at(slice.in_chunk);
  for (std::size_t a = format_.masters(); a < format_.arrays(); ++a) span.state.push_back(part(a));
  return span;
}

}  // namespace sluice::engine
