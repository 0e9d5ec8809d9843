#pragma once
#include <cuda.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string_view>
#include <vector>

#include "cuda/fake/capture.h"
#include "cuda/fake/control.h"

namespace sluice::fake_cuda {

// Memory that work has to do with, while the work is queued.
struct Range {
  std::uint64_t begin, end;
  bool is_host;
};

// Thrown where work is waited for that waits for other ranks. The caller tries again.
struct WaitsForRanks {};

// The streams, what is queued on them, and when it is done.
class Work {
 public:
  explicit Work(const Settings& settings);

  // A blocking one waits for the default stream, as that does for it. It can only be captured: in which order
  // the work of both would be done is not known here.
  CUstream make_stream(bool is_blocking = false);
  CUevent make_event(bool is_timed);
  void end(CUstream stream);  // what is queued on it is done later
  void end(CUevent event);

  void queue(CUstream stream, std::vector<Range> ranges, std::function<void()> run);
  // The same for work that may run once `is_ready` says so, which is asked when its turn has come.
  void queue_for_ranks(CUstream stream, std::vector<Range> ranges, std::function<bool()> is_ready,
                       std::function<void()> run);
  // Does what such work needs of its stream and of others, on all streams: other ranks wait for it.
  void serve_ranks();
  void record(CUevent event, CUstream stream);
  void wait(CUstream stream, CUevent event);
  bool query(CUevent event);
  void finish(CUevent event);
  void finish(CUstream stream);
  double milliseconds_between(CUevent first, CUevent second);

  void begin_capture(CUstream stream, CUstreamCaptureMode mode);
  void end_capture(CUstream stream);
  CUstreamCaptureStatus capture_status(CUstream stream);
  Captures& captures() { return captures_; }

  void leave_out(const LeftOut& what) { left_out_ = what; }
  std::uint64_t left_out() const { return times_left_out_; }

  // Does what the schedule wants done at a call.
  void turn();
  // Whether a call is left out now.
  bool leaves_out(std::string_view function, int stream, int awaited = -1);
  // Whether queued work has to do with these bytes.
  bool uses(std::uint64_t begin, std::uint64_t end, bool is_host) const;

  std::size_t streams() const { return alive_streams_; }
  std::size_t events() const { return events_.size(); }

 private:
  // A place of a stream. Who waits for an event waits for the place that it had then, also where it was
  // recorded anew, and on another stream, since.
  struct Recording {
    bool is_done = false;
    std::uint64_t time = 0;  // when it was done, in operations
  };
  struct Event {
    bool is_timed;
    int stream = -1;                  // on which it was recorded last
    int questions = 0;                // since it was recorded
    std::shared_ptr<Recording> last;  // null: it was never recorded
    bool is_done() const { return last == nullptr || last->is_done; }
  };
  struct Operation {
    std::vector<Range> ranges;
    std::function<void()> run;
    std::shared_ptr<Recording> recorded, awaited;
    std::function<bool()> is_ready = {};  // empty: at once
  };
  struct Stream {
    int index = 0;  // in the order of making
    std::deque<Operation> queue;
    std::uint64_t queued = 0, done = 0;
    bool is_ended = false, is_blocking = false;
    unsigned eagerness = 0;
  };
  Stream& find(CUstream stream);
  Stream& find_uncaptured(CUstream stream, const char* use);
  Stream& find_to_queue(CUstream stream);
  std::shared_ptr<Event> find(CUevent event);
  bool can_run(const Stream& stream) const;
  void run_next(Stream& stream);
  void run_until(Stream& stream, std::uint64_t done);
  void run_until(const Recording& recording);
  bool run_some();

  Schedule schedule_;
  const bool shares_memory_;
  std::mt19937_64 random_;
  std::uint64_t next_ = 16, time_ = 0;  // handles below mean something else
  std::size_t alive_streams_ = 0;
  int streams_made_ = 0;
  std::optional<LeftOut> left_out_;
  std::uint64_t times_left_out_ = 0;
  std::map<std::uint64_t, Stream> streams_;
  Captures captures_;
  std::map<std::uint64_t, std::shared_ptr<Event>> events_;
};

}  // namespace sluice::fake_cuda
