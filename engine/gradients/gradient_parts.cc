#include "engine/gradients/gradient_parts.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/bytes.h"

namespace sluice::engine {
namespace {

ShardMemory::Sizes sizes_of(const Plan& plan, const Ranks* ranks, const Gradients& gradients) {
  ShardMemory::Sizes sizes(plan.units.size());
  for (UnitId unit = 0; unit < sizes.size(); ++unit)
    if (plan.units[unit].tier(Part::kGradient) == allocator::Tier::kRanks)
      sizes[unit] = ranks->own(unit).size() * size_of(gradients.final_type(unit));
  return sizes;
}

}  // namespace

GradientParts::GradientParts(const Layout& layout, const Plan& plan, const Ranks* ranks, Gradients& gradients,
                             Pager& pager, DeviceWork* gpu)
    : layout_(layout),
      ranks_(ranks),
      gradients_(gradients),
      pager_(pager),
      gpu_(gpu),
      adds_(plan.sums_each_backward),
      memory_(sizes_of(plan, ranks, gradients)),
      records_(plan.units.size()) {
  for (const UnitPlan& unit : plan.units) cut_.push_back(unit.gradient_in_shards);
}

std::size_t GradientParts::bytes(UnitId unit) const {
  return ranks_->own(unit).size() * size_of(gradients_.final_type(unit));
}

bool GradientParts::define_record(UnitId unit, const UnitPlan& placed, Backings& backings) {
  if (!placed.gradient_shard_in_record() || records_[unit] != nullptr) return false;
  records_[unit] =
      backings.make({.tier = placed.tier(Part::kGradient),
                     .name = "part of the gradient of " + layout_.units()[unit].name,
                     .bytes = final_gradient_bytes(ranks_->own(unit).size(), gradients_.final_type(unit)),
                     .purpose = allocator::Purpose::kGradient});
  return true;
}

void GradientParts::define(const Plan& plan, Backings& backings) {
  for (UnitId unit = 0; unit < records_.size(); ++unit) define_record(unit, plan.units[unit], backings);
}

void GradientParts::start(allocator::Ledger& ledger) {
  if (adds_) staging_ = ComputeRegion(ledger, gpu_, allocator::Purpose::kStaging, staging_bytes());
  if (gpu_ != nullptr) {
    if (adds_) gpu_->add({staging_.data(), staging_bytes()}, staging_bytes() / kPieces);
    return memory_.start(ledger, *gpu_, allocator::Purpose::kGradient);
  }
  std::size_t room = 0;  // that a later plan may need
  for (UnitId unit = 0; unit < cut_.size(); ++unit)
    if (cut_[unit]) room += ShardMemory::room(bytes(unit));
  memory_.start(ledger, allocator::Purpose::kGradient, room);
}

void GradientParts::keep(Threads& threads, UnitId unit, std::span<const Mean> means) {
  if (!has(unit) || means.empty()) return;
  const Array from{pager_.data(gradients_.holding(unit, 0)), Dtype::kF32};
  const ElementRange part = ranks_->own(unit);
  if (!in_memory(unit) && gpu_ == nullptr) keep_on_disk(threads, unit, means, from);
  for (const Mean& mean : means) {
    const ElementRange here = intersection(part, elements_of(layout_, mean.parameter));
    if (here.size() > 0 && in_memory(unit))
      put(threads, mean, here, from.at(here.begin),
          Array{data(unit), Dtype::kF32}.at(here.begin - part.begin));
    else if (here.size() > 0 && gpu_ != nullptr)
      keep_in_host(threads, unit, mean, here, from);
    gradients_.leave_buffer(mean.parameter);
  }
}

void GradientParts::put(Threads& threads, const Mean& mean, ElementRange elements, Array from, Array to) {
  const std::size_t bytes = elements.size() * sizeof(float);
  if (mean.factor) return gradients_.add_to_part(threads, mean.parameter, elements, from, *mean.factor, to);
  if (gpu_ == nullptr) {
    std::copy_n(static_cast<const std::byte*>(from.data), bytes, static_cast<std::byte*>(to.data));
    return;
  }
  const DeviceWork::Memory read{static_cast<const std::byte*>(from.data), bytes},
      written{static_cast<const std::byte*>(to.data), bytes};
  gpu_->queue(gpu_->ranks(), {&read, 1}, {&written, 1}, [&] {
    gpu_->device().copy(gpu_->ranks(), reinterpret_cast<DeviceAddress>(to.data),
                        reinterpret_cast<DeviceAddress>(from.data), bytes);
  });
}

// A part to which a mean is added passes through GPU memory piece by piece.
void GradientParts::keep_in_host(Threads& threads, UnitId unit, const Mean& mean, ElementRange elements,
                                 Array from) {
  const auto at = [](Array array, std::size_t element) {
    return static_cast<std::byte*>(array.at(element).data);
  };
  const Array part{record(unit)->for_cpu().data, Dtype::kF32};
  const std::size_t first = ranks_->own(unit).begin;
  if (!mean.factor)
    return gpu_->copy_out(at(part, elements.begin - first),
                          {at(from, elements.begin), elements.size() * sizeof(float)});
  for (std::size_t begin = elements.begin, number = 0; begin < elements.end;
       begin += kPieceElements, ++number) {
    const ElementRange here = {begin, std::min(begin + kPieceElements, elements.end)};
    const std::size_t bytes = here.size() * sizeof(float);
    std::byte* const in_host = at(part, begin - first);
    gpu_->copy_in(piece(number), {in_host, bytes}, DeviceWork::Flow::kChunks);
    put(threads, mean, here, from.at(begin), {piece(number), Dtype::kF32});
    gpu_->copy_out(in_host, {piece(number), bytes}, DeviceWork::Flow::kChunks);
  }
}

// A record is written in whole blocks, in which there may be a part that stays as it is. The next piece is
// read while this one is computed and the one before is written.
void GradientParts::keep_on_disk(Threads& threads, UnitId unit, std::span<const Mean> means, Array from) {
  const ElementRange part = ranks_->own(unit);
  bool reads = false;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    reads = reads || gradients_.is_apart(p);
  for (const Mean& mean : means) reads = reads || mean.factor.has_value();
  const std::size_t count = divide_up(part.size(), kPieceElements);
  std::array<TransferGroup, kPieces> transfers;
  const auto bytes_of = [&](std::size_t number) {
    const std::size_t begin = part.begin + number * kPieceElements;
    const std::size_t elements = std::min(kPieceElements, part.end - begin);
    return std::span(piece(number), round_up(elements * sizeof(float), kDiskBlock));
  };
  const auto begin = [&](std::size_t number) {
    TransferGroup& transfer = transfers[number % kPieces];
    transfer.wait();
    if (reads) record(unit)->fetch(number * kPieceElements * sizeof(float), bytes_of(number), transfer.add());
  };
  for (std::size_t number = 0; number < count; ++number) {
    if (number == 0) begin(0);
    if (number + 1 < count) begin(number + 1);
    TransferGroup& transfer = transfers[number % kPieces];
    transfer.wait();
    const std::size_t first = part.begin + number * kPieceElements;
    const ElementRange here = {first, std::min(first + kPieceElements, part.end)};
    for (const Mean& mean : means)
      if (const ElementRange both = intersection(here, elements_of(layout_, mean.parameter)); both.size() > 0)
        put(threads, mean, both, from.at(both.begin),
            Array{piece(number), Dtype::kF32}.at(both.begin - first));
    record(unit)->store(number * kPieceElements * sizeof(float), bytes_of(number), threads, transfer.add());
  }
  for (TransferGroup& transfer : transfers) transfer.wait();
}

// ---- change of plan ----

void GradientParts::leave_memory(const Plan& next) {
  std::vector<UnitId> leaving;
  for (UnitId unit = 0; unit < cut_.size(); ++unit)
    if (in_memory(unit) && next.units[unit].gradient_shard_in_record()) leaving.push_back(unit);
  if (!leaving.empty()) memory_.leave(leaving);
}

void GradientParts::enter_memory(const Plan& next) {
  for (UnitId unit = 0; unit < cut_.size(); ++unit)
    if (cut_[unit] && !in_memory(unit) && !next.units[unit].gradient_shard_in_record())
      memory_.enter(unit, bytes(unit));
}

}  // namespace sluice::engine
