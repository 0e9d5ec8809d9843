#include "engine/planner/walk.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <utility>

namespace sluice::engine {
namespace {

// The third step is measured: it begins and ends as every later one does.
constexpr std::size_t kCountedSteps = 2;
constexpr double kUnknown = -1, kNothing = 1e-9;

class Walk {
 public:
  Walk(const std::vector<Visit>& visits, const Reach& reach, const MachineRates& rates)
      : visits_(visits), reach_(reach), rates_(rates), count_(visits.size()) {
    times_.resize(std::bit_ceil(reach.window + reach.ahead + 2));
    std::size_t units = 0;
    for (const Visit& visit : visits) units = std::max(units, visit.unit + 1);
    due_.resize(units);
    gathered_.resize(units);
  }

  StepTime run() {
    double before = 0;
    for (std::size_t i = 0; i < (kCountedSteps + 1) * count_; ++i) {
      if (i == kCountedSteps * count_) {
        before = now_;
        time_ = {};
      }
      at(i + reach_.ahead) = {};
      here_ = i;
      begin(i);
      prefetch(i);
      compute(i);
      sum(i);
      if (visit(i).after.any())
        add({i, visit(i).after, 1, true});
      else
        at(i).done = now_;
    }
    time_.step = now_ - before;
    return time_;
  }

 private:
  struct Pending {
    std::size_t visit;
    UpdateWork work;
    double left;      // the share that is left
    bool has_frames;  // whether its visit has frames, which come back when the update is complete
  };
  // When what a visit needs has come, when its frames hold what is to be written, and when they are free.
  struct Times {
    double ready = kUnknown, done = kUnknown, freed = kUnknown;
  };
  Times& at(std::size_t i) { return times_[i & (times_.size() - 1)]; }
  const Visit& visit(std::size_t i) const {
    while (i >= count_) i -= count_;
    return visits_[i];
  }
  bool has_predecessor(std::size_t i) const {
    return visit(i).frames && i >= reach_.window;
  }  // whose frames it takes
  std::size_t predecessor(std::size_t i) const { return i - reach_.window; }

  // meanwhile: the cores compute beside the transfer, and owe it a share of their time.
  void move(double since, double seconds, std::uint64_t bytes, bool meanwhile) {
    disk_ = std::max(disk_, since) + seconds;
    time_.disk += seconds;
    if (meanwhile) owed_ += static_cast<double>(bytes);
  }

  void write_out(std::size_t i, bool meanwhile) {
    Times& times = at(i);
    if (times.done == kUnknown || times.freed != kUnknown) return;
    const std::uint64_t bytes = visit(i).written;
    if (bytes > 0) move(now_, disk_seconds(0, bytes, rates_), bytes, meanwhile);
    times.freed = bytes > 0 ? disk_ : times.done;
  }

  // While the cores wait for something, they have time for what ranks send.
  void wait_until(double time) {
    owed_to_ranks_ = std::max(0.0, owed_to_ranks_ - std::max(0.0, time - now_));
    now_ = std::max(now_, time);
  }

  // Returns when what is asked for at that time has come from other ranks.
  double receive(double since, const Arriving& arriving) {
    owed_to_ranks_ += static_cast<double>(arriving.bytes) * rates_.rank_processor_seconds / rates_.cores;
    const double seconds = over_links(arriving, rates_);
    if (seconds == 0) return since;
    time_.link += seconds;
    return link_ = std::max(link_, since) + seconds;
  }

  // A rank waits for a sum of what is in frames when it has the next one, or at once where there are no
  // frames for that, and for all sums at the end of the step.
  void sum(std::size_t i) {
    const double before = now_;
    wait_for_sums(i);
    time_.sums += now_ - before;
  }
  void wait_for_sums(std::size_t i) {
    if (visit(i).summed.bytes > 0) {
      if (visit(i).sum_in_frames) wait_until(summed_in_frames_);
      summed_ = receive(now_, visit(i).summed);
      if (visit(i).sum_in_frames) summed_in_frames_ = summed_;
    }
    if (!reach_.sums_beside) wait_until(summed_in_frames_);
    if (i % count_ + 1 == count_) wait_until(summed_);
  }

  // Asks for what other ranks have updated of the units whose updates are complete.
  void gather() {
    for (const auto& [update, arriving] : to_gather_) gathered_[visit(update).unit] = receive(now_, arriving);
    to_gather_.clear();
  }

  void fetch(std::size_t i, double since, bool meanwhile) {
    const std::uint64_t bytes = visit(i).fetched;
    if (bytes > 0) move(since, disk_seconds(bytes, 0, rates_), bytes, meanwhile);
    at(i).ready = bytes > 0 ? disk_ : 0;
    if (visit(i).pulled.bytes > 0) at(i).ready = std::max(at(i).ready, receive(since, visit(i).pulled));
    if (visit(i).before.any()) add({i, visit(i).before, 1, false});
  }

  void begin(std::size_t i) {
    if (at(i).ready == kUnknown) {
      double since = now_;
      if (has_predecessor(i)) {
        while (at(predecessor(i)).done == kUnknown) drain();
        write_out(predecessor(i), false);
        since = std::max(now_, at(predecessor(i)).freed);
      }
      fetch(i, since, false);
    }
    wait_until(at(i).ready);
    while (due_[visit(i).unit] > 0) drain();
    const double before = now_;
    wait_until(gathered_[visit(i).unit]);
    time_.updates += now_ - before;
  }

  // Transfers of frames begin only at an access.
  void prefetch(std::size_t i) {
    const std::size_t first = i - std::min(i, reach_.window + 1);
    for (std::size_t k = first; k < i; ++k)
      if (visit(k).written == 0) write_out(k, true);
    for (std::size_t next = i + 1; next <= i + reach_.ahead; ++next) {
      if (at(next).ready != kUnknown) continue;
      if (has_predecessor(next)) {
        const double freed = at(predecessor(next)).freed;
        if (freed == kUnknown || freed > now_) break;
      }
      fetch(next, now_, true);
    }
    for (std::size_t k = first; k < i; ++k) write_out(k, true);
  }

  // Completes the first update that waits, while nothing else is computed.
  void drain() {
    const Pending first = pending_.front();
    const UpdateWork& work = first.work;
    const double seconds = first.left * disk_seconds(work.read, work.written, rates_),
                 arithmetic = first.left * work.seconds;
    if (seconds > 0) move(now_, seconds, 0, false);
    time_.optimizer += arithmetic;
    const double end = std::max(now_ + arithmetic, seconds > 0 ? disk_ : 0);
    time_.updates += end - now_;
    now_ = end;
    finish();
    gather();
  }

  void add(const Pending& update) {
    pending_.push_back(update);
    ++due_[visit(update.visit).unit];
  }

  void finish() {
    const Pending& first = pending_.front();
    const bool is_near = first.visit + reach_.window + 1 >= here_;  // nothing looks at earlier visits
    if (first.work.gathered.bytes > 0) to_gather_.emplace_back(first.visit, first.work.gathered);
    if (first.has_frames && is_near) at(first.visit).done = now_;
    --due_[visit(first.visit).unit];
    pending_.pop_front();
  }

  void compute(std::size_t i) {
    const double end = now_ + visit(i).compute;
    double optimizer = 0;
    auto steps = static_cast<double>(visit(i).steps);
    while (!pending_.empty()) {
      Pending& first = pending_.front();
      const UpdateWork& work = first.work;
      const double seconds = disk_seconds(work.read, work.written, rates_);
      double share = first.left;
      if (seconds > 0) {
        const double a_step =
            static_cast<double>(reach_.slots) / static_cast<double>(std::max<std::size_t>(1, work.chunks));
        share = std::min({share, steps * a_step, std::max(0.0, end - std::max(disk_, now_)) / seconds});
        steps -= share / a_step;
        move(now_, share * seconds,
             static_cast<std::uint64_t>(share * static_cast<double>(work.read + work.written)), true);
      }
      optimizer += share * work.seconds;
      first.left -= share;
      if (first.left > kNothing) break;
      finish();
    }
    // Receives within layers take the cores' time, too, as far as the cores do not wait for them.
    owed_to_ranks_ +=
        static_cast<double>(visit(i).received_while_computing) * rates_.rank_processor_seconds / rates_.cores;
    owed_to_ranks_ = std::max(0.0, owed_to_ranks_ - visit(i).layers);
    const double transfers = owed_ * rates_.disk_processor_seconds / rates_.cores + owed_to_ranks_;
    owed_ = owed_to_ranks_ = 0;
    time_.compute += visit(i).compute - visit(i).layers;
    time_.link += visit(i).layers;
    time_.optimizer += optimizer;
    time_.updates += optimizer;
    time_.transfers += transfers;
    now_ = end + optimizer + transfers;
    gather();
  }

  const std::vector<Visit>& visits_;
  const Reach reach_;
  const MachineRates& rates_;
  const std::size_t count_;
  double now_ = 0, disk_ = 0;  // until when the cores, and the disk, are busy
  // Until when the link is busy, the last sum goes on, and the last one of what is in frames.
  double link_ = 0, summed_ = 0, summed_in_frames_ = 0;
  double owed_ = 0;           // bytes of the disk whose share of the cores is not counted yet
  double owed_to_ranks_ = 0;  // seconds of all cores
  std::vector<Times> times_;  // of visits that are near: a ring
  std::size_t here_ = 0;
  std::deque<Pending> pending_;
  std::vector<std::pair<std::size_t, Arriving>> to_gather_;  // of which updates, by visit
  std::vector<std::size_t> due_;                             // by unit: how many updates are pending
  std::vector<double> gathered_;  // by unit: when what other ranks have updated has come
  StepTime time_;
};

}  // namespace

double over_links(const Arriving& arriving, const MachineRates& rates) {
  return link_seconds(arriving.by_link, rates.link) + link_seconds(arriving.in_host, rates.host_link);
}

double seconds_of_ranks(const Arriving& arriving, const MachineRates& rates) {
  return std::max(over_links(arriving, rates),
                  static_cast<double>(arriving.bytes) * rates.rank_processor_seconds);
}

StepTime walk(const std::vector<Visit>& visits, const Reach& reach, const MachineRates& rates) {
  return visits.empty() ? StepTime() : Walk(visits, reach, rates).run();
}

}  // namespace sluice::engine
