#include "engine/machine/clocks.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "core/error.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

using Clock = std::function<std::int64_t()>;

constexpr std::size_t kTrips = 12;
constexpr const char* kQuestion = "a question for the time";
constexpr const char* kAnswer = "the time of a clock";
constexpr const char* kClocks = "the clocks of all ranks";

using Times = std::array<std::int64_t, kTrips>;

auto bytes_of(std::int64_t& value) { return std::as_writable_bytes(std::span(&value, 1)); }

// Answers each question on the communicator's thread, so that no other thread has to wake up first.
void answer(comm::Communicator& communicator, const Clock& clock) {
  Times questions = {}, times = {};
  TransferGroup group;
  for (std::size_t trip = 0; trip < kTrips; ++trip) {
    const Done received = group.add(), sent = group.add();
    communicator.receive(0, call_id(kQuestion), kQuestion, bytes_of(questions[trip]),
                         [&, trip, received, sent](const std::exception_ptr& error) {
                           times[trip] = clock();
                           if (error)
                             sent(error);
                           else
                             communicator.send(0, call_id(kAnswer), kAnswer, bytes_of(times[trip]), sent);
                           received(error);
                         });
  }
  group.wait();
}

ClockReading ask(comm::Communicator& communicator, int rank, const Clock& clock) {
  Times questions = {}, answers = {}, begins = {}, ends = {};
  TransferGroup all;
  std::array<TransferGroup, kTrips> arrivals;
  for (std::size_t trip = 0; trip < kTrips; ++trip)
    communicator.receive(rank, call_id(kAnswer), kAnswer, bytes_of(answers[trip]),
                         [&, trip, arrived = arrivals[trip].add()](const std::exception_ptr& error) {
                           ends[trip] = clock();
                           arrived(error);
                         });
  for (std::size_t trip = 0; trip < kTrips; ++trip) {
    begins[trip] = clock();
    communicator.send(rank, call_id(kQuestion), kQuestion, bytes_of(questions[trip]), all.add());
    arrivals[trip].wait();
  }
  all.wait();
  ClockReading best = {0, 0, std::numeric_limits<std::int64_t>::max()};
  for (std::size_t trip = 0; trip < kTrips; ++trip) {
    const std::int64_t length = ends[trip] - begins[trip], uncertainty = length - length / 2;
    if (uncertainty < best.uncertainty)
      best = {answers[trip], answers[trip] - (begins[trip] + length / 2), uncertainty};
  }
  return best;
}

}  // namespace

std::int64_t steady_nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<ClockReading> read_clocks(comm::Communicator& communicator, const Clock& clock) {
  std::string text;
  if (communicator.rank() == 0) {
    std::vector<ClockReading> readings = {{clock(), 0, 0}};
    for (int rank = 1; rank < communicator.size(); ++rank) readings.push_back(ask(communicator, rank, clock));
    text.assign(reinterpret_cast<const char*>(readings.data()), readings.size() * sizeof(ClockReading));
  } else {
    answer(communicator, clock);
  }
  const std::string given = communicator.exchange(call_id(kClocks), kClocks, text)[0];
  std::vector<ClockReading> readings(static_cast<std::size_t>(communicator.size()));
  ensure(given.size() == readings.size() * sizeof(ClockReading), "clocks have {} bytes of {}", given.size(),
         readings.size() * sizeof(ClockReading));
  std::memcpy(readings.data(), given.data(), given.size());
  return readings;
}

std::int64_t time_of_first(const ClockReading& first, const ClockReading& last, std::int64_t time) {
  const std::int64_t inside = std::clamp(time, first.time, last.time);
  const double share = first.time == last.time ? 0
                                               : static_cast<double>(inside - first.time) /
                                                     static_cast<double>(last.time - first.time);
  return time - first.ahead - std::llround(share * static_cast<double>(last.ahead - first.ahead));
}

}  // namespace sluice::engine
