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

void set_factors(const ElementwiseUpdate& update, GpuUpdate& arguments) {
  struct Set {
    GpuUpdate& to;
    void operator()(const AdamFactors& factors) { to.adam = factors; }
    void operator()(const LionFactors& factors) { to.lion = factors; }
    void operator()(const SgdFactors& factors) { to.sgd = factors; }
  };
  std::visit(Set{arguments}, update.factors);
}

}  // namespace

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

void DeviceUpdate::apply(CUstream_st* stream, const Hyperparameters& hyperparameters, const Span& span,
                         const std::uint32_t* refused) {
  check_span(optimizer_, hyperparameters, span);
  check_values(optimizer_, span);
  if (span.count == 0) return;
  check_alignment(span.gradient);
  check_alignment({span.master, Dtype::kF32});
  check_alignment(span.parameter);
  GpuUpdate update;
  update.count = span.count;
  update.refused = refused;
  update.gradient = span.gradient.data;
  update.gradient_type = span.gradient.type;
  update.master = span.master;
  update.parameter = span.parameter.data;
  update.parameter_type = span.parameter.type;
  update.words = rounding_words(optimizer_, hyperparameters, span);
  for (std::size_t i = 0; i < span.state.size(); ++i) {
    const StatePart& part = span.state[i];
    check_alignment(part.values);
    check_alignment({part.scales, Dtype::kF32});
    update.state[i] = {part.values.data, part.scales, part.values.type};
    if (is_coded_) update.lines[i] = lines_of(i == 0 ? CodeMap::kSigned : CodeMap::kUnsigned);
  }
  set_factors(*optimizer_.elementwise(hyperparameters), update);
  device_.launch(stream, span.master == nullptr ? rounded_ : with_master_,
                 launch_blocks(span.count, kGpuElements), kGpuThreads, &update);
}

}  // namespace sluice::optim
