#include "cuda/fake/work.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cuda/fake/memory.h"

namespace sluice::fake_cuda {
namespace {

// So often an event that could be done says that it is not, where work is done late.
constexpr int kLateQuestions = 3;
// Of so many turns a stream takes as many as it is eager, in an order at random.
constexpr unsigned kEagerness = 32;

// The default stream, which is there from the beginning. (Work that is queued on none is a misuse.)
const std::uint64_t kDefault = reinterpret_cast<std::uint64_t>(CU_STREAM_LEGACY);

std::uint64_t number_of(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

}  // namespace

Work::Work(const Settings& settings)
    : schedule_(settings.schedule), shares_memory_(settings.shares_memory), random_(settings.seed) {
  streams_[kDefault].eagerness = kEagerness;
}

CUstream Work::make_stream(bool is_blocking) {
  Stream stream;
  stream.is_blocking = is_blocking;
  stream.index = streams_made_++;
  stream.eagerness = std::array{1U, kEagerness / 2, kEagerness}[random_() % 3];
  streams_.emplace(next_, std::move(stream));
  ++alive_streams_;
  return reinterpret_cast<CUstream>(next_++);
}
CUevent Work::make_event(bool is_timed) {
  events_.emplace(next_, std::make_shared<Event>(Event{is_timed, -1, 0, nullptr}));
  return reinterpret_cast<CUevent>(next_++);
}

Work::Stream& Work::find(CUstream stream) {
  const auto found = streams_.find(number_of(stream));
  if (stream == nullptr || found == streams_.end() || found->second.is_ended)
    throw Refusal{CUDA_ERROR_INVALID_HANDLE, stream == nullptr
                                                 ? "the default stream is used, which waits for all others"
                                                 : "a stream is used that has ended"};
  return found->second;
}
std::shared_ptr<Work::Event> Work::find(CUevent event) {
  const auto found = events_.find(number_of(event));
  if (found == events_.end()) throw Refusal{CUDA_ERROR_INVALID_HANDLE, "an event is used that has ended"};
  return found->second;
}

void Work::end(CUstream stream) {
  find(stream).is_ended = true;
  --alive_streams_;
}
void Work::end(CUevent event) {
  find(event);
  events_.erase(number_of(event));
}

Work::Stream& Work::find_uncaptured(CUstream stream, const char* use) {
  Stream& s = find(stream);
  captures_.refuse_use(stream, use);
  return s;
}
Work::Stream& Work::find_to_queue(CUstream stream) {
  Stream& s = find_uncaptured(stream, "work is queued on a stream");
  if (s.is_blocking)
    throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "work is queued on a stream that waits for the default one"};
  return s;
}

void Work::begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  const Stream& s = find_uncaptured(stream, "a capture begins of a stream");
  if (number_of(stream) == kDefault && !shares_memory_)
    throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream is captured"};
  captures_.begin(stream, mode, s.is_blocking);
}
void Work::end_capture(CUstream stream) {
  (void)find(stream);
  captures_.end(stream);
}
CUstreamCaptureStatus Work::capture_status(CUstream stream) {
  (void)find(stream);
  return captures_.status(stream);
}

void Work::queue(CUstream stream, std::vector<Range> ranges, std::function<void()> run) {
  Stream& s = find_to_queue(stream);
  s.queue.push_back({std::move(ranges), std::move(run), nullptr, nullptr, {}});
  ++s.queued;
}
void Work::queue_for_ranks(CUstream stream, std::vector<Range> ranges, std::function<bool()> is_ready,
                           std::function<void()> run) {
  Stream& s = find_to_queue(stream);
  s.queue.push_back({std::move(ranges), std::move(run), nullptr, nullptr, std::move(is_ready)});
  ++s.queued;
}
void Work::serve_ranks() {
  for (auto& [number, stream] : streams_) {
    std::uint64_t place = stream.done, last = 0;
    for (const Operation& operation : stream.queue) {
      ++place;
      if (operation.is_ready) last = place;
    }
    try {
      run_until(stream, last);
    } catch (const WaitsForRanks&) {  // until the next time
    }
  }
}
void Work::record(CUevent event, CUstream stream) {
  Stream& s = find_to_queue(stream);
  const auto e = find(event);
  if (leaves_out("cuEventRecord", s.index)) return;
  e->stream = s.index;
  e->questions = 0;
  e->last = std::make_shared<Recording>();
  s.queue.push_back({{}, nullptr, e->last, nullptr, {}});
  ++s.queued;
}
void Work::wait(CUstream stream, CUevent event) {
  Stream& s = find_to_queue(stream);
  const auto e = find(event);
  if (leaves_out("cuStreamWaitEvent", s.index, e->stream)) return;
  s.queue.push_back({{}, nullptr, nullptr, e->last, {}});
  ++s.queued;
}

bool Work::leaves_out(std::string_view function, int stream, int awaited) {
  const bool is = left_out_ && left_out_->function == function && left_out_->stream == stream &&
                  left_out_->awaited == awaited;
  times_left_out_ += is ? 1 : 0;
  return is;
}

bool Work::can_run(const Stream& stream) const {
  if (stream.queue.empty()) return false;
  const Operation& first = stream.queue.front();
  return (!first.awaited || first.awaited->is_done) && (!first.is_ready || first.is_ready());
}

void Work::run_next(Stream& stream) {
  const Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  ++stream.done;
  ++time_;
  if (operation.run) operation.run();
  if (!operation.recorded) return;
  operation.recorded->is_done = true;
  operation.recorded->time = time_;
}

void Work::run_until(Stream& stream, std::uint64_t done) {
  while (stream.done < done) {
    const Operation& first = stream.queue.front();
    if (first.awaited) run_until(*first.awaited);
    if (first.is_ready && !first.is_ready()) throw WaitsForRanks();
    run_next(stream);
  }
}
void Work::run_until(const Recording& recording) {
  if (recording.is_done) return;
  for (auto& [number, stream] : streams_) {
    std::uint64_t place = stream.done;
    for (const Operation& operation : stream.queue) {
      ++place;
      if (operation.recorded.get() == &recording) return run_until(stream, place);
    }
  }
  throw Refusal{CUDA_ERROR_UNKNOWN, "an event is waited for that no stream has"};
}

// Does the next operation of each stream whose turn comes. Returns whether there was one.
bool Work::run_some() {
  bool has_run = false;
  for (auto& [number, stream] : streams_) {
    const bool is_due = schedule_ == Schedule::kEarly || random_() % kEagerness < stream.eagerness;
    if (!is_due || !can_run(stream)) continue;
    run_next(stream);
    has_run = true;
  }
  return has_run;
}

void Work::turn() {
  if (shares_memory_) run_until(streams_[kDefault], streams_[kDefault].queued);
  if (schedule_ == Schedule::kLate) return;
  while (run_some()) {
  }
}

bool Work::query(CUevent event) {
  const auto e = find(event);
  if (!e->is_done() && leaves_out("cuEventQuery", e->stream)) return true;
  try {
    if (!e->is_done() && ++e->questions > kLateQuestions) run_until(*e->last);
  } catch (const WaitsForRanks&) {  // as it does at the next question
  }
  return e->is_done();
}
void Work::finish(CUevent event) {
  const auto e = find(event);
  if (e->last && !leaves_out("cuEventSynchronize", e->stream)) run_until(*e->last);
}
void Work::finish(CUstream stream) {
  Stream& s = find_uncaptured(stream, "a stream is waited for");
  if (!leaves_out("cuStreamSynchronize", s.index)) run_until(s, s.queued);
}

double Work::milliseconds_between(CUevent first, CUevent second) {
  const auto a = find(first), b = find(second);
  if (!a->is_timed || !b->is_timed || !a->last || !b->last)
    throw Refusal{CUDA_ERROR_INVALID_HANDLE, "the time of an event is asked for that has none"};
  if (!a->is_done() || !b->is_done()) throw Refusal{CUDA_ERROR_NOT_READY, {}};
  return 1e-3 * (static_cast<double>(b->last->time) - static_cast<double>(a->last->time));
}

bool Work::uses(std::uint64_t begin, std::uint64_t end, bool is_host) const {
  for (const auto& [number, stream] : streams_)
    for (const Operation& operation : stream.queue)
      for (const Range& range : operation.ranges)
        if (range.is_host == is_host && range.begin < end && begin < range.end) return true;
  return false;
}

}  // namespace sluice::fake_cuda
