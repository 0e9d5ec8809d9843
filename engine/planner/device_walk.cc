#include "engine/planner/walk.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <queue>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

// The third step is measured: it begins and ends as every later one does.
constexpr std::size_t kCountedOnGpu = 2;
// How many chunks of an update are told apart: more say nothing new, and planning takes their time.
constexpr std::size_t kMostChunks = 24;

class WalkOnGpu {
 public:
  WalkOnGpu(const std::vector<UnitOnGpu>& units, const GpuReach& reach, const MachineRates& rates)
      : units_(units),
        reach_(reach),
        rates_(rates),
        free_extents_(reach.extents),
        accesses_((kCountedOnGpu + 1) * 2 * units.size()),
        came_(accesses_ + (reach.settles ? reach.ahead : 0)),
        current_(units.size(), true),
        leaving_(units.size()),
        begun_(units.size()),
        ended_(units.size()),
        held_(units.size()) {
    for (const Work work : {Work::kByGpu, Work::kByCpu, Work::kSum, Work::kGather})
      pipeline(work).slots = shape(work).slots;
    std::uint64_t read = 0, written = 0;
    for (const UnitOnGpu& unit : units) {
      read += unit.forward.from_disk + unit.backward.from_disk + unit.read;
      written += unit.forward.to_disk + unit.backward.to_disk + unit.written;
    }
    // Where reads and writes of the disk run together, each takes less.
    const double in_turn = disk_seconds(read, 0, rates) + disk_seconds(0, written, rates);
    disk_share_ = in_turn > 0 ? disk_seconds(read, written, rates) / in_turn : 0;
  }

  double run() {
    double before = 0;
    for (std::size_t access = 0; access < accesses_; ++access) {
      if (access == kCountedOnGpu * 2 * units_.size()) before = now_;
      here_ = access;
      begin(access);
      now_ += use(access).compute;
      go_on_until(now_);
      end(access);
    }
    return now_ - before;
  }

 private:
  enum class Way : std::uint8_t { kIn, kOut, kGpu, kCpu, kRanks, kRead, kWrite };
  static constexpr std::size_t kWays = 6;  // reads and writes share the disk
  struct Stage {
    Way way = Way::kIn;
    double amount = 0;  // seconds, or bytes
  };
  enum class Kind : std::uint8_t { kFetch, kLeave, kLeaveEarlier, kChunk };
  // The work on a unit that goes chunk by chunk: a sum, then an update by one processor, then a gather.
  enum class Work : std::uint8_t { kByGpu, kByCpu, kSum, kGather };
  // A transfer or chunk, which passes several ways, one after the other.
  struct Job {
    double time = 0;           // when it comes to the stage that is next
    std::uint64_t number = 0;  // of jobs that come at the same time the first one goes first
    Kind kind = Kind::kFetch;
    std::size_t of = 0;        // the access, or the unit
    Work work = Work::kByGpu;  // of a chunk
    std::size_t stage = 0, stages = 0;
    std::array<Stage, 5> ways = {};
    void pass(Way way, double amount) {
      if (amount > 0) ways[stages++] = {way, amount};
    }
    bool operator>(const Job& other) const {
      return time != other.time ? time > other.time : number > other.number;
    }
  };
  struct Pipeline {
    std::size_t slots = 1;             // that are free
    std::deque<std::size_t> due = {};  // units whose chunks have not all begun
  };

  Pipeline& pipeline(Work work) { return pipelines_[static_cast<std::size_t>(work)]; }
  const GpuReach::Pipeline& shape(Work work) const {
    return work == Work::kByGpu ? reach_.gpu : work == Work::kByCpu ? reach_.cpu : reach_.ranks;
  }
  bool is_forward(std::size_t access) const { return access / units_.size() % 2 == 0; }
  std::size_t unit_of(std::size_t access) const {
    const std::size_t at = access % units_.size();
    return is_forward(access) ? at : units_.size() - 1 - at;
  }
  const UnitOnGpu::Use& use(std::size_t access) const {
    const UnitOnGpu& unit = units_[unit_of(access)];
    return is_forward(access) ? unit.forward : unit.backward;
  }
  std::size_t extents_of(std::size_t access) const { return std::min(use(access).extents, reach_.extents); }
  // An update that streams nothing is one chunk.
  std::size_t chunks_of(std::size_t id, Work work) const {
    const UnitOnGpu& unit = units_[id];
    if ((work == Work::kByGpu || work == Work::kByCpu) && !unit.streams()) return 1;
    return std::clamp<std::size_t>(divide_up(unit.elements, shape(work).chunk_elements), 1, kMostChunks);
  }

  void begin(std::size_t access) {
    take_frames();
    while (next_ <= access || !came_[access] || !current_[unit_of(access)]) wait(access);
  }
  void wait(std::size_t access) {
    ensure(!jobs_.empty(), "access {} of a step on a GPU waits for nothing", access);
    step();
    now_ = std::max(now_, clock_);
  }

  // Frames are given back when backward has ended, or the gradient has left, or the update that follows it at
  // once is complete.
  void end(std::size_t access) {
    clock_ = now_;
    const std::size_t id = unit_of(access);
    const UnitOnGpu& unit = units_[id];
    if (is_forward(access)) {
      if (unit.forward.left > 0) start(leaving(Kind::kLeaveEarlier, access));
      return give_frames(access);
    }
    const bool updates_now = reach_.in_backward && unit.elements > 0;
    leaving_[id] = unit.backward.left > 0;
    if (leaving_[id]) {
      start(leaving(Kind::kLeave, access));
    } else if (updates_now) {
      held_[id] = access;
    } else {
      give_frames(access);
    }
    if (updates_now && unit.sum.any())
      sum(id);
    else if (updates_now)
      update(id);
    if (!reach_.in_backward) end_of_one(id);
    if (id > 0 || !reach_.settles) return;
    while (std::ranges::count(current_, false) > 0) wait(access);
  }

  // Nothing waits for gradients of earlier micro-batches, which count with forward.
  Job leaving(Kind kind, std::size_t access) const {
    Job job{.kind = kind, .of = access};
    job.pass(Way::kOut, static_cast<double>(use(access).left));
    job.pass(Way::kWrite, static_cast<double>(use(access).to_disk));
    return job;
  }

  // Where updates come at the step's end, which the first unit's backward is.
  void end_of_one(std::size_t id) {
    if (reach_.sums_beside && units_[id].sum.any()) sum(id);
    if (id > 0) return;
    for (std::size_t each = 0; each < units_.size(); ++each)
      if (!reach_.sums_beside && units_[each].sum.any()) sum(each);
    for (std::size_t each = 0; each < units_.size(); ++each)
      if (units_[each].elements > 0) current_[each] = false;
    waits_for_sums_ = true;
    update_all_that_are_summed();
  }
  void update_all_that_are_summed() {
    if (sums_ > 0 || !std::exchange(waits_for_sums_, false)) return;
    for (std::size_t each = 0; each < units_.size(); ++each)
      if (units_[each].elements > 0) update(each);
  }

  // Accesses take frames in order. A unit is not fetched before its update is complete.
  void take_frames() {
    for (; next_ < came_.size() && next_ <= here_ + reach_.ahead; ++next_) {
      if (extents_of(next_) > free_extents_ || !current_[unit_of(next_)]) return;
      free_extents_ -= extents_of(next_);
      Job job{.kind = Kind::kFetch, .of = next_};
      job.pass(Way::kRead, static_cast<double>(use(next_).from_disk));
      job.pass(Way::kRanks, use(next_).from_ranks);
      job.pass(Way::kIn, static_cast<double>(use(next_).fetched));
      if (job.stages > 0)
        start(job);
      else
        came_[next_] = true;
    }
  }
  void give_frames(std::size_t access) {
    free_extents_ += extents_of(access);
    take_frames();
  }

  void sum(std::size_t id) {
    ++sums_;
    do_by_chunks(id, Work::kSum);
  }
  void update(std::size_t id) { do_by_chunks(id, units_[id].by_cpu ? Work::kByCpu : Work::kByGpu); }
  void do_by_chunks(std::size_t id, Work work) {
    current_[id] = false;
    begun_[id] = ended_[id] = 0;
    pipeline(work).due.push_back(id);
    begin_chunks(work);
  }

  void begin_chunks(Work work) {
    Pipeline& pipeline = this->pipeline(work);
    while (!pipeline.due.empty() && pipeline.slots > 0) {
      const std::size_t id = pipeline.due.front();
      if (leaving_[id]) return;
      --pipeline.slots;
      start(chunk_of(id, work));
      if (++begun_[id] == chunks_of(id, work)) pipeline.due.pop_front();
    }
  }

  // A CPU's chunk begins with its gradient, and ends with parameters; a GPU's with state, which goes back.
  Job chunk_of(std::size_t id, Work work) const {
    const UnitOnGpu& unit = units_[id];
    const double share = 1 / static_cast<double>(chunks_of(id, work));
    Job job{.kind = Kind::kChunk, .of = id, .work = work};
    const auto bytes = [&](std::uint64_t all) { return share * static_cast<double>(all); };
    if (work == Work::kSum || work == Work::kGather) {
      const UnitOnGpu::Call& call = work == Work::kSum ? unit.sum : unit.gather;
      job.pass(Way::kOut, bytes(call.out));
      job.pass(Way::kRanks, share * call.seconds);
      job.pass(Way::kIn, bytes(call.in));
      job.pass(Way::kOut, bytes(call.kept));
      return job;
    }
    job.pass(Way::kRead, bytes(unit.read));
    job.pass(unit.by_cpu ? Way::kOut : Way::kIn, bytes(unit.by_cpu ? unit.out : unit.in));
    job.pass(unit.by_cpu ? Way::kCpu : Way::kGpu, share * unit.update);
    job.pass(unit.by_cpu ? Way::kIn : Way::kOut, bytes(unit.by_cpu ? unit.in : unit.out));
    job.pass(Way::kWrite, bytes(unit.written));
    return job;
  }

  void start(Job job) {
    job.time = clock_;
    job.number = count_++;
    jobs_.push(job);
  }

  double& free_at(Way way) {
    return free_at_[static_cast<std::size_t>(way == Way::kWrite ? Way::kRead : way)];
  }
  // The seconds of a stage that begins at that time.
  double seconds(const Stage& stage, double begin) {
    const auto copy = [&](double alone, Way other) {
      return stage.amount / (free_at(other) > begin ? std::min(alone, rates_.gpu.both / 2) : alone);
    };
    switch (stage.way) {
      case Way::kIn:
        return copy(rates_.gpu.in, Way::kOut);
      case Way::kOut:
        return copy(rates_.gpu.out, Way::kIn);
      case Way::kRead:
        return disk_share_ * stage.amount / rates_.disk_read;
      case Way::kWrite:
        return disk_share_ * stage.amount / rates_.disk_write;
      default:
        return stage.amount;
    }
  }

  // Goes on with the job that comes next to a stage, or has ended.
  void step() {
    Job job = jobs_.top();
    jobs_.pop();
    clock_ = job.time;
    if (job.stage == job.stages) return finish(job);
    const Stage& stage = job.ways[job.stage++];
    double& free = free_at(stage.way);
    const double begin = std::max(clock_, free);
    job.time = free = begin + seconds(stage, begin);
    jobs_.push(job);
  }
  void go_on_until(double time) {
    while (!jobs_.empty() && jobs_.top().time <= time) step();
  }

  void finish(const Job& job) {
    if (job.kind == Kind::kLeaveEarlier) return;
    if (job.kind == Kind::kFetch) {
      came_[job.of] = true;
    } else if (job.kind == Kind::kLeave) {
      const std::size_t id = unit_of(job.of);
      leaving_[id] = false;
      give_frames(job.of);
      const bool is_summed = units_[id].sum.any();
      begin_chunks(is_summed ? Work::kSum : units_[id].by_cpu ? Work::kByCpu : Work::kByGpu);
    } else {
      ++pipeline(job.work).slots;
      begin_chunks(job.work);
      if (++ended_[job.of] == chunks_of(job.of, job.work)) go_on_with(job.of, job.work);
    }
  }
  void go_on_with(std::size_t id, Work ended) {
    if (ended == Work::kSum) {
      --sums_;
      return reach_.in_backward ? update(id) : update_all_that_are_summed();
    }
    if (ended != Work::kGather && units_[id].gather.any()) return do_by_chunks(id, Work::kGather);
    current_[id] = true;
    if (const auto access = std::exchange(held_[id], std::nullopt)) give_frames(*access);
    take_frames();
  }

  const std::vector<UnitOnGpu>& units_;
  const GpuReach reach_;
  const MachineRates& rates_;
  double disk_share_ = 0;
  // The client has come to this time, and all else to that one.
  double now_ = 0, clock_ = 0;
  std::size_t here_ = 0, next_ = 0;  // the present access, and the next one to take frames
  std::size_t free_extents_;
  const std::size_t accesses_;
  // By access. A step that settles goes on with fetches for the next one meanwhile.
  std::vector<bool> came_;
  std::vector<bool> current_, leaving_;           // by unit
  std::vector<std::size_t> begun_, ended_;        // by unit: chunks of what is done with it
  std::vector<std::optional<std::size_t>> held_;  // by unit: the access whose frames its update holds
  std::array<Pipeline, 4> pipelines_;             // by work
  std::size_t sums_ = 0;                          // under way
  bool waits_for_sums_ = false;                   // whether all updates do
  std::array<double, kWays> free_at_ = {};
  std::uint64_t count_ = 0;
  std::priority_queue<Job, std::vector<Job>, std::greater<>> jobs_;
};

}  // namespace

double walk_on_gpu(const std::vector<UnitOnGpu>& units, const GpuReach& reach, const MachineRates& rates) {
  return units.empty() ? 0 : WalkOnGpu(units, reach, rates).run();
}

}  // namespace sluice::engine
