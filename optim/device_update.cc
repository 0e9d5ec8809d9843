#include "optim/device_update.h"

#include <algorithm>

#include "core/device_array.h"
#include "core/error.h"
#include "optim/code_table.h"
#include "optim/cuda/update.h"
#include "optim/elementwise.h"

namespace sluice::optim {
namespace {

CodeLines lines_of(CodeMap map) {
  const CodeTable& table = code_table(map);
  CodeLines lines;
  std::copy_n(table.slopes.begin(), std::size(lines.slopes), lines.slopes);
  std::copy_n(table.offsets.begin(), std::size(lines.offsets), lines.offsets);
  std::copy(table.inverse_slopes.begin(), table.inverse_slopes.end(), lines.inverse_slopes);
  std::copy(table.inverse_offsets.begin(), table.inverse_offsets.end(), lines.inverse_offsets);
  return lines;
}

// Whether groups of four elements of every array are aligned for one access.
bool is_aligned(const Span& span) {
  constexpr std::size_t kElements = 4;
  const auto is = [](const ConstArray& array) {
    return reinterpret_cast<std::uintptr_t>(array.data) % (kElements * size_of(array.type)) == 0;
  };
  return is(span.gradient) && is({span.master, Dtype::kF32}) && is(span.parameter) &&
         std::ranges::all_of(span.state, [&](const StatePart& part) { return is(part.values); });
}

}  // namespace

const std::size_t DeviceUpdate::kMostTogether = kSpansOfLaunch;

DeviceUpdate::DeviceUpdate(Device& device, const Optimizer& optimizer)
    : device_(device),
      optimizer_(optimizer),
      is_coded_(optimizer.storage().state == Dtype::kU8 && !optimizer.state().empty()) {
  const auto how = optimizer.elementwise({});
  if (!how)
    fail(ErrorCode::kInvalidArgument,
         "{} cannot update on a GPU, since it looks at each parameter as a whole; update on the CPU, or "
         "choose "
         "adamw, adam, lion or sgd",
         optimizer.name());
  const std::string name = fmt::format("sluice_{}_{}_", how->name, is_coded_ ? "coded" : "plain");
  with_master_ = device.kernel((name + "master").c_str());
  rounded_ = device.kernel((name + "rounded").c_str());
}

void DeviceUpdate::check(const Part& part, const Span& first) const {
  const Span& span = part.span;
  check_span(optimizer_, part.hyperparameters, span);
  check_values(optimizer_, span);
  check_alignment(span.gradient);
  check_alignment({span.master, Dtype::kF32});
  check_alignment(span.parameter);
  for (const StatePart& state : span.state) {
    check_alignment(state.values);
    check_alignment({state.scales, Dtype::kF32});
  }
  ensure(span.gradient.type == first.gradient.type && span.parameter.type == first.parameter.type &&
             (span.master == nullptr) == (first.master == nullptr),
         "spans that are updated together have different types");
}

void DeviceUpdate::apply(CUstream_st* stream, std::span<const Part> parts, const std::uint32_t* refused) {
  for (const Part& part : parts) check(part, parts.front().span);
  while (!parts.empty()) {
    const auto together = parts.first(std::min(parts.size(), kMostTogether));
    std::visit([&](const auto& of) { launch<std::decay_t<decltype(of)>>(stream, together, refused); },
               optimizer_.elementwise(together.front().hyperparameters)->factors);
    parts = parts.subspan(together.size());
  }
}

template <class Factors>
void DeviceUpdate::launch(CUstream_st* stream, std::span<const Part> parts, const std::uint32_t* refused) {
  GpuUpdates<Factors> updates;
  updates.refused = refused;
  updates.seed = optimizer_.storage().seed;
  updates.state_type = optimizer_.storage().state;
  updates.gradient_type = parts.front().span.gradient.type;
  updates.parameter_type = parts.front().span.parameter.type;
  if (is_coded_) {
    updates.lines[0] = lines_of(CodeMap::kSigned);
    updates.lines[1] = lines_of(CodeMap::kUnsigned);
  }
  std::size_t blocks = 0;
  for (const Part& part : parts) {
    const Span& span = part.span;
    if (span.count == 0) continue;
    const RoundingWords words = rounding_words(optimizer_, part.hyperparameters, span);
    GpuSpan<Factors>& to = updates.spans[updates.count];
    to.count = span.count;
    to.gradient = span.gradient.data;
    to.master = span.master;
    to.parameter = span.parameter.data;
    for (std::size_t i = 0; i < span.state.size(); ++i)
      to.state[i] = {span.state[i].values.data, span.state[i].scales};
    to.stream = words.stream;
    to.first_index = words.first_index;
    to.factors = std::get<Factors>(optimizer_.elementwise(part.hyperparameters)->factors);
    to.is_aligned = is_aligned(span);
    blocks += divide_up(span.count, kGpuElements);
    updates.ends[updates.count++] = static_cast<std::uint32_t>(blocks);
  }
  if (updates.count == 0) return;
  device_.launch(stream, parts.front().span.master == nullptr ? rounded_ : with_master_,
                 launch_blocks(blocks, 1), kGpuThreads, &updates);
}

}  // namespace sluice::optim
