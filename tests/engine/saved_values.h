#pragma once
#include "engine/steps/engine.h"
#include "float_array.h"
#include "testing.h"

// Reads the values that an engine saves, by the names of parameters. One that spans units is whole here.
namespace sluice::engine {

struct SavedValues {
  using Values = std::map<std::string, std::vector<float>>;
  Values values, masters;
  std::array<Values, 3> states;
  std::map<std::string, std::vector<std::vector<float>>> wholes;
  bool operator==(const SavedValues&) const = default;
};

// Both must outlive the sink. Arrays come from several threads at once, each of them to a map of its own.
inline UnitSink sink_of(SavedValues& saved, const Layout& layout) {
  const auto append = [&layout](SavedValues::Values& to, ParameterId p, std::size_t first, std::size_t count,
                                const auto& value) {
    std::vector<float>& all = to[layout.spec(p).name];
    EXPECT_EQ(all.size(), layout.spec(p).span_first + first) << "elements come out of order";
    all.reserve(layout.spec(p).whole_elements());
    for (std::size_t i = 0; i < count; ++i) all.push_back(value(i));
  };
  UnitSink sink;
  sink.parameter = [&saved, append](ParameterId p, std::size_t first, std::size_t count, ConstArray values) {
    append(saved.values, p, first, count, [&](std::size_t i) { return test::value_at(values, i); });
  };
  sink.master = [&saved, append](ParameterId p, std::size_t first, std::span<const float> values) {
    append(saved.masters, p, first, values.size(), [&](std::size_t i) { return values[i]; });
  };
  sink.state = [&saved, append](ParameterId p, std::size_t array, std::size_t first, std::size_t count,
                                ConstArray values, const float* scales) {
    append(saved.states.at(array), p, first, count, [&](std::size_t i) {
      if (values.type != Dtype::kU8) return test::value_at(values, i);
      return scales[i / optim::kScaleBlock] * static_cast<const std::uint8_t*>(values.data)[i];
    });
  };
  sink.whole = [&saved, &layout](ParameterId p, std::size_t, std::span<const float> values) {
    saved.wholes[layout.spec(p).name].emplace_back(values.begin(), values.end());
  };
  return sink;
}

}  // namespace sluice::engine
