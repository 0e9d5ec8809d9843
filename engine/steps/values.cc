#include "engine/steps/values.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/steps/core.h"
#include "engine/steps/unit_values.h"

namespace sluice::engine {

namespace {

// Rank 0 waits so long for a change that it has made itself.
constexpr std::chrono::seconds kMostBehind{30};

bool is_refusal(const std::exception_ptr& error) {
  if (error == nullptr) return false;
  try {
    std::rethrow_exception(error);
  } catch (const StateRefused&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

Values::Values(Core& core) : c_(core), has_(core.layout.units().size()) {}

ValueStreams Values::streams(UnitId unit) {
  Ranks* const parts = c_.partitions_state(unit) ? &*c_.ranks : nullptr;
  for (int rank = 0; parts != nullptr && rank < parts->size() &&
                     formats_of_ranks_.size() < static_cast<std::size_t>(parts->size());
       ++rank)
    formats_of_ranks_.emplace_back(c_.layout, c_.optimizer, c_.plan.chunk_elements,
                                   Shards::of(rank, parts->size(), c_.plan.partitions_state()));
  return {c_.layout,
          c_.states,
          c_.updates,
          c_.resources,
          parts,
          &formats_of_ranks_,
          c_.host_staging ? &*c_.host_staging : nullptr};
}

void Values::require(UnitId unit) const {
  if (!has_[unit])
    refuse(ErrorCode::kState,
           "unit '{}' has no values yet, or was given them by a source that failed; load it first",
           c_.name_of(unit));
}

std::exception_ptr Values::load(UnitId unit, const UnitSource& source) {
  c_.share_memory();
  c_.report_work();  // ranks that load faster wait for this one
  if (!source.values) require(unit);
  c_.settle();
  ++c_.changes[unit];
  has_[unit] = false;
  std::byte* values = c_.pager.acquire(c_.parameters[unit], Pager::Use::kModify);
  std::exception_ptr failed = load_values(streams(unit), unit, {values, c_.layout.dtype(unit)}, source,
                                          c_.partitions_parameters(unit));
  try {
    if (failed == nullptr) c_.wholes.load(unit, source.whole);
  } catch (...) {
    failed = std::current_exception();
  }
  c_.pager.written(c_.parameters[unit], c_.layout.unit_bytes(unit));
  if (c_.partitions_parameters(unit))
    take_shard(unit, failed == nullptr);
  else
    c_.pager.release(c_.parameters[unit]);
  has_[unit] = failed == nullptr;
  if (!source.state)  // zero state means that the parameter was never updated
    std::fill(c_.applied.begin() + c_.layout.first_parameter(unit),
              c_.applied.begin() + c_.layout.end_parameter(unit), 0);
  return failed;
}

// Publishes this rank's shard of a gathered unit once no rank reads the previous version. If loading failed,
// the old shard stays.
void Values::take_shard(UnitId unit, bool loaded) {
  const HoldingId values = c_.parameters[unit];
  const bool was_published = c_.parameter_shards->was_published(unit);
  if (loaded) {
    if (was_published) wait_for_edit(unit);
    c_.take_shard(unit);
    c_.parameter_shards->expect(unit);
  }
  c_.pager.release(values);
  if (!loaded && !was_published) return c_.pager.discard(values);
  c_.pager.outdate(values);
  c_.pager.unpark(values);
  if (loaded) c_.parameter_shards->publish(unit);
}

std::exception_ptr Values::save(UnitId unit, const UnitSink& sink, bool alone) {
  require(unit);
  if (alone && c_.partitions_state(unit) && c_.ranks->rank() > 0) return nullptr;
  c_.report_work();  // other ranks wait for the one that writes
  c_.settle();
  if (sink.values && c_.partitions_state(unit)) return save_parameters_alone(unit, sink);
  const bool sends = c_.partitions_state(unit) && c_.ranks->rank() > 0;  // only its part of the state
  std::byte* const values = sends ? nullptr : c_.pager.acquire(c_.parameters[unit], Pager::Use::kRead);
  if (!sends && unit + 1 < c_.parameters.size()) c_.pager.prefetch_one(c_.parameters[unit + 1]);
  ValueStreams from = streams(unit);
  if (alone) from.changes = c_.changes[unit];
  std::exception_ptr failed = save_values(from, unit, {values, c_.layout.dtype(unit)}, sink);
  if (failed == nullptr && c_.partitions_state(unit)) failed = gather_wholes(unit, alone);
  try {
    if (failed == nullptr) c_.wholes.save(unit, sink.whole);
  } catch (...) {
    failed = std::current_exception();
  }
  if (!sends) c_.pager.release(c_.parameters[unit]);
  was_refused_ = was_refused_ || is_refusal(failed);
  return failed;
}

std::exception_ptr Values::save_own(UnitId unit, const UnitSink& sink, const WantedElements& wanted) {
  require(unit);
  c_.report_work();
  c_.settle();
  OwnParameters own;
  std::exception_ptr failed;
  if (c_.partitions_parameters(unit) && c_.parameter_shards->on_disk(unit)) {
    own.read = [&](std::size_t offset, std::span<std::byte> into, Done done) {
      c_.parameter_shards->read(unit, offset, into, std::move(done));
    };
  } else if (c_.partitions_parameters(unit)) {
    own.shard = {c_.parameter_shards->data(unit), c_.layout.dtype(unit)};
    own.on_gpu = c_.parameter_shards->on_gpus();
  } else if (wanted.parameters({0, c_.layout.unit_elements(unit)})) {
    const std::byte* const values = c_.pager.acquire(c_.parameters[unit], Pager::Use::kRead);
    failed = save_wanted_parameters(streams(unit), unit, {values, c_.layout.dtype(unit)}, sink, wanted);
    c_.pager.release(c_.parameters[unit]);
  }
  if (failed == nullptr) failed = save_own_chunks(streams(unit), unit, own, sink, wanted);
  try {
    if (failed == nullptr) c_.wholes.save(unit, sink.whole);
  } catch (...) {
    failed = std::current_exception();
  }
  return failed;
}

std::exception_ptr Values::save_parameters_alone(UnitId unit, const UnitSink& sink) {
  const std::byte* const values = c_.pager.acquire(c_.parameters[unit], Pager::Use::kRead);
  std::exception_ptr failed = save_parameters(streams(unit), unit, {values, c_.layout.dtype(unit)}, sink);
  c_.pager.release(c_.parameters[unit]);
  return failed;
}

// Sends the arrays of whole parameters to rank 0 from the rank that has the first element: a parameter that
// is not cut is updated there alone. Returns why a rank that is read refuses.
std::exception_ptr Values::gather_wholes(UnitId unit, bool alone) {
  for (ParameterId p = c_.layout.first_parameter(unit); p < c_.layout.end_parameter(unit); ++p) {
    if (c_.layout.spec(p).continues()) continue;
    const int owner = c_.ranks->owner(unit, c_.layout.location(p).offset);
    const std::span<std::byte> values = std::as_writable_bytes(c_.wholes.values(p));
    if (owner == 0 || values.empty()) continue;
    if (alone) {
      try {
        c_.ranks->read_state(owner, {.whole = p, .changes = c_.changes[unit]}, values);
      } catch (const StateRefused&) {
        return std::current_exception();
      }
      continue;
    }
    if (c_.ranks->rank() == owner) c_.ranks->send_whole(p, values);
    if (c_.ranks->rank() == 0) c_.ranks->receive_whole(owner, p, values);
  }
  return nullptr;
}

std::optional<UnitId> Values::unit_of(const StateRead& read) const {
  if (read.whole ? *read.whole >= c_.layout.parameters() : read.unit >= c_.layout.units().size()) return {};
  const UnitId unit = read.whole ? c_.layout.location(*read.whole).unit : read.unit;
  const bool has = c_.partitions_state(unit) &&
                   (read.whole || read.chunk < c_.states.format().shards().chunks(unit)) && !c_.gpu;
  return has ? std::optional(unit) : std::nullopt;
}

void Values::serve(bool may_settle) {
  StateReads& reads = c_.ranks->state_reads();
  const std::optional<StateRead> read = reads.next();
  if (!read) return;
  const auto refuse_it = [&](const std::string& why) {
    reads.refuse(std::make_exception_ptr(Error(ErrorCode::kState, why)));
  };
  const std::optional<UnitId> found = unit_of(*read);
  if (!found) return refuse_it("optimizer state is read that it has not, or has on a GPU");
  const UnitId unit = *found;
  if (c_.changes[unit] > read->changes)
    return refuse_it(fmt::format(
        "the values or the state of '{}' were set or edited there while another rank takes the state; do "
        "that when it has the state",
        c_.name_of(unit)));
  if (c_.changes[unit] < read->changes) {
    if (reads.waited() > kMostBehind)
      refuse_it(fmt::format(
          "this rank has not made a change of '{}' within {} s that the other one has made: an "
          "optimizer.step(), or a change of parameters, which counts when the model or the optimizer is "
          "called next; let all ranks take the state after such a change",
          c_.name_of(unit), kMostBehind.count()));
    return;
  }
  if (may_settle && !c_.queue.settled()) c_.settle();
  if (!c_.queue.settled()) return;  // an update that waits may need the slot of the answer
  if (read->whole) return reads.answer(std::as_bytes(c_.wholes.values(*read->whole)));
  const auto answer = [&](std::span<const std::byte> state) { reads.answer(state); };
  if (const std::exception_ptr failed = save_chunk(streams(unit), unit, read->chunk, answer))
    std::rethrow_exception(failed);
}

void Values::state_is_taken(const std::string& error) {
  if (!c_.ranks || !c_.ranks->any_partitioned()) return;
  StateReads& reads = c_.ranks->state_reads();
  if (c_.ranks->rank() == 0) return reads.tell_taken(c_.steps, error, !std::exchange(was_refused_, false));
  asked_ = asked_after_ == c_.steps ? asked_ + 1 : 1;
  asked_after_ = c_.steps;
  TransferGroup answer;
  c_.ranks->ask_whether_taken(asked_, c_.steps, answer.add());
  while (!answer.finished()) {
    reads.wait_a_moment();
    serve(true);
  }
  c_.ranks->wait_for_answer(0, answer);
}

// When all ranks are here, none reads the shards that are about to change.
void Values::wait_for_edit(UnitId unit) {
  c_.await_copies(unit);
  c_.waits.during(Waits::For::kRanks, "the edit of " + c_.name_of(unit),
                  [&] { c_.ranks->wait_for_edit(unit, [this] { c_.serve_ranks(); }); });
}

// Masters pass through the staging slots, so that the pipeline must be idle.
void Values::take_masters(UnitId unit) {
  if (!c_.states.has_master(unit)) return;
  c_.settle();
  ++c_.changes[unit];
  engine::take_masters(streams(unit), unit, {c_.pager.data(c_.parameters[unit]), c_.layout.dtype(unit)});
}

}  // namespace sluice::engine
