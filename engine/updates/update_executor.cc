#include "engine/updates/update_executor.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/layout/kind.h"
#include "engine/updates/update_spans.h"

namespace sluice::engine {
namespace {

class TurnExecutor final : public UpdateExecutor {
 public:
  TurnExecutor(const Layout& layout, const optim::Optimizer& optimizer, const StateFormat& format,
               const WholeStore& wholes, const ExecutorTools& tools)
      : layout_(layout),
        optimizer_(optimizer),
        format_(format),
        wholes_(wholes),
        tools_(tools),
        spans_(layout, format) {}

  void start(allocator::Ledger& ledger) override {
    rounds_memory_ =
        allocator::Region(ledger, allocator::Purpose::kWorkspace, rounds_need(layout_, optimizer_).bytes);
  }
  void begin(const ChunkWork& work, Done done) override {
    std::exception_ptr error;
    const auto begin = Trace::Clock::now();
    try {
      if (work.prepare) work.prepare();
      if (!work.update.is_refused()) compute(work);
    } catch (...) {
      error = std::current_exception();
    }
    const auto end = Trace::Clock::now();
    seconds_ += std::chrono::duration<double>(end - begin).count();
    if (tools_.trace != nullptr)
      tools_.trace->add(Trace::Lane::kOptimizer, layout_.units()[work.update.unit].name, begin, end);
    done(error);
  }
  Threads& threads() override { return tools_.threads; }
  double seconds() const override { return seconds_; }

 private:
  void compute(const ChunkWork& work);
  void begin_round(const ChunkWork& work, const std::vector<optim::Whole>& wholes);
  void work_on_parameter(const ChunkWork& work, ParameterId parameter, const optim::Whole& whole);
  void combine(const ChunkWork& work, const std::vector<optim::Whole>& wholes);
  std::vector<optim::Whole> wholes_of(const Bucket& bucket) const;

  const Layout& layout_;
  const optim::Optimizer& optimizer_;
  const StateFormat& format_;
  const WholeStore& wholes_;
  ExecutorTools tools_;
  UpdateSpans spans_;
  allocator::Region rounds_memory_;
  double seconds_ = 0;
};

void TurnExecutor::compute(const ChunkWork& work) {
  const std::vector<optim::Whole> wholes = wholes_of(work.bucket);
  if (work.begins_round) begin_round(work, wholes);
  for (ParameterId p = work.bucket.first; work.chunk && p < work.bucket.end; ++p)
    if (spans_.is_updated(work.update, p)) work_on_parameter(work, p, wholes[p - work.bucket.first]);
  if (work.ends_round && !work.applies()) combine(work, wholes);
}

void TurnExecutor::begin_round(const ChunkWork& work, const std::vector<optim::Whole>& wholes) {
  if (work.round == 0 && work.bucket.scratch_bytes > 0)
    std::fill_n(rounds_memory_.data(), work.bucket.scratch_bytes, std::byte{0});
  for (const optim::Whole& whole : wholes) {
    if (work.round == 0 || work.applies() || !optimizer_.has_rounds(whole.kind)) continue;
    const optim::PartSums sums = optimizer_.sums(work.round, whole);
    std::ranges::fill(sums.f64, 0.0);
    std::ranges::fill(sums.f32, 0.0f);
  }
}

void TurnExecutor::work_on_parameter(const ChunkWork& work, ParameterId parameter,
                                     const optim::Whole& whole) {
  const Slice slice = format_.shards().slice(parameter, *work.chunk);
  if (slice.count == 0) return;
  optim::Span span = spans_.span_of(work, slice);
  span.whole = whole;
  const optim::Hyperparameters hyperparameters = spans_.hyperparameters_of(work.update, parameter);
  if (work.applies())
    optimizer_.apply(tools_.threads, hyperparameters, span);
  else if (optimizer_.has_rounds(whole.kind))
    optimizer_.statistics(tools_.threads, work.round, hyperparameters, span);
}

void TurnExecutor::combine(const ChunkWork& work, const std::vector<optim::Whole>& wholes) {
  for (ParameterId p = work.bucket.first; p < work.bucket.end; ++p) {
    const optim::Whole& whole = wholes[p - work.bucket.first];
    if (!spans_.is_updated(work.update, p) || !optimizer_.has_rounds(whole.kind)) continue;
    if (tools_.others != nullptr) tools_.others->add(work.update.unit, optimizer_.sums(work.round, whole));
    optimizer_.combine(tools_.threads, tools_.products, work.round, spans_.hyperparameters_of(work.update, p),
                       whole);
  }
}

std::vector<optim::Whole> TurnExecutor::wholes_of(const Bucket& bucket) const {
  std::vector<optim::Whole> wholes;
  std::byte* scratch = rounds_memory_.data();
  std::byte* const workspace = scratch + bucket.scratch_bytes;
  for (ParameterId p = bucket.first; p < bucket.end; ++p) {
    const optim::Kind kind = kind_of(layout_.spec(p));
    wholes.push_back({kind, wholes_.data(p), reinterpret_cast<double*>(scratch), workspace});
    scratch += scratch_bytes(optimizer_, kind);
  }
  return wholes;
}

}  // namespace

std::unique_ptr<UpdateExecutor> make_inline_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, const WholeStore& wholes,
                                                     const ExecutorTools& tools) {
  return std::make_unique<TurnExecutor>(layout, optimizer, format, wholes, tools);
}

}  // namespace sluice::engine
