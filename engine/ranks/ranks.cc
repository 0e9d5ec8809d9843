#include "engine/ranks/ranks.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

std::uint64_t state_id(UnitId unit, std::size_t chunk) { return StateRead{unit, chunk}.key(); }

}  // namespace

Ranks::Ranks(comm::Communicator& communicator, const Layout& layout, const optim::Optimizer& optimizer,
             std::vector<bool> partitioned)
    : communicator_(communicator),
      layout_(layout),
      partitioned_(std::move(partitioned)),
      any_partitioned_(std::ranges::count(partitioned_, true) > 0),
      shards_(layout, optimizer, kChunkGrain, {communicator.size(), 0, communicator.size()}) {}

ElementRange Ranks::own(UnitId unit) const {
  if (partitioned(unit)) return shard(unit, rank());
  return {0, layout_.unit_elements(unit)};
}

std::vector<std::size_t> Ranks::borders(UnitId unit) const {
  std::vector<std::size_t> borders;
  for (int r = 0; r < size(); ++r) borders.push_back(shard(unit, r).begin);
  borders.push_back(layout_.unit_elements(unit));
  return borders;
}

// The borders of the ranks' shards within these elements of the unit.
std::vector<std::size_t> Ranks::borders_in(UnitId unit, ElementRange elements) const {
  std::vector<std::size_t> all = borders(unit);
  for (std::size_t& border : all) border = std::clamp(border, elements.begin, elements.end) - elements.begin;
  return all;
}

void Ranks::sum_gradient(UnitId unit, int use, std::span<const Array> sums, const comm::SumOrder& order,
                         const Packing* packing, std::shared_ptr<const comm::Given> given, Done done) {
  const std::uint64_t id = call_id(CallKind::kGradient, static_cast<std::uint64_t>(use) << 32 | unit);
  if (!partitioned(unit))
    return communicator_.all_reduce(id, gradient_name(unit), sums,
                                    packing != nullptr ? packing->size() : use_elements(layout_, unit, use),
                                    order, std::move(done), std::move(given));
  std::vector<std::size_t> parts = borders(unit);
  for (std::size_t& border : parts) {
    border = in_use(layout_, unit, use, border);
    if (packing != nullptr) border = packing->position(border);
  }
  communicator_.reduce_scatter(id, gradient_name(unit), sums, parts, order, std::move(done),
                               std::move(given));
}

std::string Ranks::name_of(UnitId unit) const {
  return "the parameters of '" + layout_.units()[unit].name + "'";
}

std::string Ranks::gradient_name(UnitId unit) const {
  return "the gradient of '" + layout_.units()[unit].name + "'";
}

void Ranks::sum_gradient_in(UnitId unit, ElementRange elements, std::span<const Array> sums,
                            const comm::SumOrder& order, Done done) {
  const std::uint64_t id = call_id(CallKind::kPartOfGradient, unit);
  if (!partitioned(unit))
    return communicator_.all_reduce(id, gradient_name(unit), sums, elements.size(), order, std::move(done));
  communicator_.reduce_scatter(id, gradient_name(unit), sums, borders_in(unit, elements), order,
                               std::move(done));
}

std::shared_ptr<const Ranks::Types> Ranks::meet(UnitId unit, bool gradient, std::size_t piece, Dtype type,
                                                Done done) {
  using Told = std::array<std::uint64_t, 2>;  // the piece, and its type
  const auto all = static_cast<std::size_t>(size());
  const auto told = std::make_shared<std::vector<Told>>(all);
  (*told)[static_cast<std::size_t>(rank())] = {piece, static_cast<std::uint64_t>(type)};
  std::vector<std::size_t> parts;
  for (std::size_t r = 0; r <= all; ++r) parts.push_back(r * sizeof(Told));
  const auto types = std::make_shared<Types>(all);
  const std::string name = gradient ? gradient_name(unit) : name_of(unit);
  communicator_.all_gather(
      call_id(gradient ? CallKind::kGradientIsThere : CallKind::kUnitIsThere, unit), name,
      {told->data(), Dtype::kU8}, parts,
      [told, types, name, piece, done = std::move(done)](std::exception_ptr error) {
        for (std::size_t r = 0; r < told->size(); ++r) {
          (*types)[r] = static_cast<Dtype>((*told)[r][1]);
          if (!error && (*told)[r][0] != piece)
            error = std::make_exception_ptr(
                Error(ErrorCode::kInternal, "ranks do not come to " + name + " in the same order"));
        }
        done(std::move(error));
      });
  return types;
}

void Ranks::gather_gradient_in(UnitId unit, ElementRange elements, Array sum, Done done) {
  communicator_.all_gather(call_id(CallKind::kWholeGradient, unit), gradient_name(unit), sum,
                           borders_in(unit, elements), std::move(done));
}

void Ranks::wait_for_edit(UnitId unit, const std::function<void()>& meanwhile) {
  communicator_.exchange(call_id(CallKind::kEdit, unit), "the edit of '" + layout_.units()[unit].name + "'",
                         {}, meanwhile);
}

void Ranks::gather_in(UnitId unit, ElementRange elements, Array values, Done done) {
  communicator_.all_gather(call_id(CallKind::kParameters, unit), name_of(unit), values,
                           borders_in(unit, elements), std::move(done));
}

void Ranks::send(std::uint64_t id, const std::string& name, std::span<const std::byte> bytes) {
  TransferGroup group;
  communicator_.send(0, id, name, bytes, group.add());
  group.wait();
}

void Ranks::receive(int rank, std::uint64_t id, const std::string& name, std::span<std::byte> bytes) {
  TransferGroup group;
  communicator_.receive(rank, id, name, bytes, group.add());
  group.wait();
}

void Ranks::send_state(UnitId unit, std::size_t chunk, std::span<const std::byte> state) {
  send(state_id(unit, chunk), state_name(unit), state);
}

void Ranks::receive_state(int rank, UnitId unit, std::size_t chunk, std::span<std::byte> state) {
  receive(rank, state_id(unit, chunk), state_name(unit), state);
}

void Ranks::send_whole(ParameterId parameter, std::span<const std::byte> values) {
  send(call_id(CallKind::kWhole, parameter), state_name(layout_.location(parameter).unit), values);
}

void Ranks::receive_whole(int rank, ParameterId parameter, std::span<std::byte> values) {
  receive(rank, call_id(CallKind::kWhole, parameter), state_name(layout_.location(parameter).unit), values);
}

void Ranks::read_state(int rank, const StateRead& read, std::span<std::byte> into) {
  TransferGroup group;
  communicator_.read(rank, read.key(), read.changes, 0, into, group.add());
  wait_for_answer(rank, group);
}

void Ranks::ask_whether_taken(std::uint64_t number, std::uint64_t steps, Done done) {
  communicator_.read(0, call_id(CallKind::kStateTaken, number), steps, 0, {}, std::move(done));
}

// An error of the run ends the work of all ranks; another one is the answer of that rank.
void Ranks::wait_for_answer(int rank, TransferGroup& answer) {
  try {
    answer.wait();
  } catch (const Error& error) {
    if (!communicator_.failure().empty()) throw;
    throw StateRefused(error.code(), fmt::format("rank {}: {}", rank, error.what()));
  }
}

void Ranks::serve(comm::Server shards) {
  communicator_.serve([reads = state_reads_, shards = std::move(shards)](const comm::Read& read,
                                                                         comm::Answer answer) {
    if (StateReads::is_of_state(read.key)) return reads->ask(read, answer);
    if (shards) return shards(read, std::move(answer));
    answer({}, std::make_exception_ptr(Error(ErrorCode::kState, "a rank has no shards of parameters")), {});
  });
}

int Ranks::owner(UnitId unit, std::size_t element) const {
  int rank = 0;
  while (shard(unit, rank).end <= element) ++rank;
  return rank;
}

std::string Ranks::state_name(UnitId unit) const {
  return "the state of '" + layout_.units()[unit].name + "'";
}

void Ranks::sum_round(std::span<double> f64, std::span<float> f32, TransferGroup& group) {
  const std::string name = "the sums of an optimizer's round";
  if (!f64.empty()) communicator_.all_reduce(call_id(CallKind::kRoundF64, 0), name, f64, group.add());
  if (!f32.empty())
    communicator_.all_reduce(call_id(CallKind::kRoundF32, 0), name, {f32.data(), Dtype::kF32}, f32.size(),
                             group.add());
}

std::vector<std::string> Ranks::exchange(const std::string& name, const std::string& own,
                                         const std::function<void()>& meanwhile) {
  return communicator_.exchange(call_id(CallKind::kExchange, 0), name, own, meanwhile);
}

}  // namespace sluice::engine
