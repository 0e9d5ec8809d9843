#include "engine/steps/unit_sums.h"

#include <algorithm>
#include <utility>

#include "comm/sums.h"
#include "core/bytes.h"
#include "kernels/elementwise.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kInCaches = std::size_t{64} << 10;  // elements

}  // namespace

UnitSums::UnitSums(Core& core, const comm::SumOrder& order, double divisor)
    : core_(core),
      order_(order),
      divisor_(divisor),
      squares_(core.layout.parameters()),
      in_record_(core.layout.units().size()) {
  if (core.device_sums && core.plan.ranks.gpus_meet) gpu_sum_.emplace(*core.resources.device);
}

bool UnitSums::is_in_record(UnitId unit) const { return core_.device_sums && core_.plan.sums_in_host(unit); }

bool UnitSums::gives_as_it_came(UnitId unit) const {
  return core_.gradients.final_type(unit) == Dtype::kF32 || core_.device_sums->takes_narrow(unit);
}

void UnitSums::hold(UnitId unit, bool changes) {
  in_record_[unit] = is_in_record(unit) && !changes && gives_as_it_came(unit) &&
                     !core_.pager.held(core_.gradients.holding(unit, 0));
  if (in_record_[unit]) return;
  for (const HoldingId holding : core_.gradients.holdings(unit, 0))
    core_.pager.acquire(holding, Pager::Use::kModify);
}

void UnitSums::let_go(UnitId unit, bool summed) {
  const HoldingId first = core_.gradients.holding(unit, 0);
  if (in_record_[unit]) {
    in_record_[unit] = false;
    if (summed) core_.pager.outdate(first);  // sums may take more of the record than the gradients took
    return core_.pager.unpark(first);
  }
  if (summed) core_.pager.written(first, core_.gradients.bytes(unit, 0));
  for (const HoldingId holding : core_.gradients.holdings(unit, 0)) {
    core_.pager.release(holding);
    if (holding != first && !core_.pager.held(holding)) core_.pager.discard(holding);
  }
}

// Releases the frames that hold() took, unless somebody else holds them, too.
bool UnitSums::may_leave_frames(UnitId unit) {
  const HoldingId gradient = core_.gradients.holding(unit, 0);
  core_.pager.written(gradient, core_.gradients.bytes(unit, 0));
  core_.pager.release(gradient);
  if (!core_.pager.held(gradient)) return true;
  core_.pager.acquire(gradient, Pager::Use::kModify);
  return false;
}

TransferGroup UnitSums::begin(UnitId unit, std::span<const ParameterId> of, bool whole) {
  TransferGroup group;
  if (!core_.ranks) return group;
  if (core_.device_sums && !(whole && gives_as_it_came(unit))) core_.gradients.widen(unit);
  if (is_in_record(unit) && !in_record_[unit]) in_record_[unit] = may_leave_frames(unit);
  if (in_record_[unit]) core_.pager.entrust(core_.gradients.holding(unit, 0));
  for (const ParameterId p : of) squares_[p].reset();
  if (whole) begin(unit, {0, core_.layout.unit_elements(unit)}, of, group.add());
  for (const ParameterId& p : of)
    if (!whole) begin(unit, elements_of(core_.layout, p), {&p, 1}, group.add());
  return group;
}

void UnitSums::begin(UnitId unit, ElementRange elements, std::span<const ParameterId> of, Done done) {
  if (core_.device_sums) return begin_on_gpu(unit, elements, of, std::move(done));
  std::vector<Array> sums;
  for (std::size_t i = 0; i < order_.arrays_of(core_.plan.ranks.rank); ++i)
    sums.push_back({core_.gradients.sum(unit, 0, i, 0) + elements.begin, Dtype::kF32});
  core_.ranks->sum_gradient_in(unit, elements, sums, order_, std::move(done));
}

void UnitSums::begin_on_gpu(UnitId unit, ElementRange elements, std::span<const ParameterId> of, Done done) {
  DeviceRanks::Call call;
  const ElementRange own = core_.own(unit);
  const HoldingId gradient = core_.gradients.holding(unit, 0);
  call.elements = elements;
  call.in_host = in_record_[unit];
  call.given = core_.gradients.final_type(unit);
  call.data = call.in_host ? core_.pager.backing(gradient).for_cpu().data : core_.pager.data(gradient);
  // `out` are the elements that other ranks read: all, where the elements are narrower than their sums.
  if (call.in_host && call.given == call.type)
    call.out = {{0, own.begin}, {own.end, core_.layout.unit_elements(unit)}};
  else
    call.out = {elements};
  if (!call.in_host) call.in = {own};
  call.may_share = core_.partitions_state(unit);
  call.unit = unit;
  call.begin = [this, unit](ElementRange piece, Array sum, Done ended) {
    core_.ranks->sum_gradient_in(unit, piece, {&sum, 1}, order_, std::move(ended));
  };
  call.end = [this, own, all = std::vector(of.begin(), of.end())](ElementRange piece, Array sum,
                                                                  std::span<const ConstArray> of_ranks) {
    const ElementRange here = intersection(own, piece);
    const std::size_t first = here.begin - piece.begin;
    const Array mean = sum.at(first);
    if (of_ranks.empty())
      kernels::scale(*core_.rank_threads, here.size(), static_cast<float>(1 / divisor_), mean);
    else
      make_mean(of_ranks, first, here.size(), mean);
    measure(all, here, mean, *core_.rank_threads);
  };
  call.make = [this, own, all = std::vector(of.begin(), of.end())](
                  ElementRange piece, Array sum, std::span<const ConstArray> of_ranks, double* squares) {
    for_each(all, intersection(own, piece), [&](ParameterId, ElementRange here) {
      const std::size_t first = here.begin - piece.begin;
      std::vector<ConstArray> given;
      for (const ConstArray& array : of_ranks) given.push_back(array.at(first));
      gpu_sum_->mean(core_.gpu->ranks(), given, here.size(), static_cast<float>(1 / divisor_), sum.at(first),
                     squares + first / kernels::kGridBlock);
    });
  };
  call.made = [this, own, all = std::vector(of.begin(), of.end())](ElementRange piece,
                                                                   std::span<const double> squares) {
    for_each(all, intersection(own, piece), [&](ParameterId p, ElementRange here) {
      const std::size_t first = (here.begin - piece.begin) / kernels::kGridBlock;
      add_squares(p,
                  squares_of(p, here, squares.subspan(first, divide_up(here.size(), kernels::kGridBlock))));
    });
  };
  core_.gradients.becomes_wide(unit);
  core_.device_sums->add(std::move(call), std::move(done));
}

// Adds the elements of all ranks from `first` on, in the order of ranks that send each other their arrays.
void UnitSums::make_mean(std::span<const ConstArray> of_ranks, std::size_t first, std::size_t n, Array mean) {
  core_.rank_threads->parallel_for(n, kInCaches, [&](std::size_t begin, std::size_t end) {
    std::vector<ConstArray> arrays;
    for (const ConstArray& array : of_ranks) arrays.push_back(array.at(first + begin));
    const Array here = mean.at(begin);
    comm::Adder().add(arrays, order_.merges, end - begin, here);
    Threads this_one(1);
    kernels::scale(this_one, end - begin, static_cast<float>(1 / divisor_), here);
  });
}

void UnitSums::finish(UnitId unit, std::span<const ParameterId> of) {
  const ElementRange own = core_.own(unit);
  if (!core_.device_sums) {
    float* const first = core_.gradients.sum(unit, 0, 0, 0);
    for (const ParameterId p : of) {
      const ElementRange here = intersection(own, elements_of(core_.layout, p));
      kernels::scale(core_.resources.threads, here.size(), static_cast<float>(1 / divisor_),
                     {first + here.begin, Dtype::kF32});
      squares_[p].reset();
    }
    measure(of, own, {first + own.begin, Dtype::kF32}, core_.resources.threads);
  }
  for (const ParameterId p : of)
    core_.gradients.begin(
        p, squares_[p] ? *squares_[p]
                       : squares_within(core_.layout, core_.one_thread, p, {}, {own.begin, own.begin}));
}

void UnitSums::gather(ParameterId parameter, Done done) {
  const UnitId unit = core_.layout.location(parameter).unit;
  const ElementRange all = elements_of(core_.layout, parameter), own = intersection(core_.own(unit), all);
  if (!core_.device_sums)
    return core_.ranks->gather_gradient_in(unit, all, {core_.gradients.data(parameter, 0), Dtype::kF32},
                                           std::move(done));
  DeviceRanks::Call call;
  call.data = core_.pager.data(core_.gradients.holding(unit, 0));
  call.elements = all;
  call.out = {own};
  call.in = {{all.begin, own.begin}, {own.end, all.end}};
  call.may_share = true;
  call.unit = unit;
  call.end = [this, unit](ElementRange piece, Array array, std::span<const ConstArray> of_ranks) {
    take_of_others(*core_.ranks, unit, piece, array, of_ranks, *core_.rank_threads);
  };
  call.make = [this, unit](ElementRange piece, Array mean, std::span<const ConstArray> of_ranks, double*) {
    take_of_others(*core_.ranks, unit, piece, mean, of_ranks, *core_.gpu);
  };
  call.begin = [this, unit](ElementRange piece, Array mean, Done ended) {
    core_.ranks->gather_gradient_in(unit, piece, mean, std::move(ended));
  };
  core_.device_sums->add(std::move(call), std::move(done));
}

template <class Body>
void UnitSums::for_each(std::span<const ParameterId> of, ElementRange elements, const Body& body) const {
  for (const ParameterId p : of)
    if (const ElementRange here = intersection(elements, elements_of(core_.layout, p)); here.size() > 0)
      body(p, here);
}

void UnitSums::measure(std::span<const ParameterId> of, ElementRange elements, Array mean, Threads& threads) {
  for_each(of, elements, [&](ParameterId p, ElementRange) {
    add_squares(p, squares_within(core_.layout, threads, p, mean, elements));
  });
}

void UnitSums::add_squares(ParameterId parameter, kernels::SquareSum squares) {
  std::optional<kernels::SquareSum>& known = squares_[parameter];
  if (known) {
    squares.sum.add(known->sum);
    squares.finite &= known->finite;
  }
  known = std::move(squares);
}

kernels::SquareSum UnitSums::squares_of(ParameterId parameter, ElementRange elements,
                                        std::span<const double> blocks) const {
  std::vector<kernels::PartialSum::Node> nodes;
  for (const double block : blocks) nodes.push_back({block, 0});
  const std::size_t first = elements.begin - elements_of(core_.layout, parameter).begin;
  return kernels::square_sum(core_.layout.spec(parameter).span_first + first, nodes);
}

}  // namespace sluice::engine
