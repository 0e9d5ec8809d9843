#include "engine/turns.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace sluice::engine {
namespace {

// By unit: how far to the front of `order` it is. One that is not in it is past the end.
std::vector<std::size_t> places_in(const std::vector<UnitId>& order, std::size_t units) {
  std::vector<std::size_t> places(units, order.size());
  for (std::size_t place = 0; place < order.size(); ++place) places[order[place]] = place;
  return places;
}

}  // namespace

std::vector<UnitId> merged(const std::vector<UnitId>& order, const Turns::OfRanks& orders) {
  const std::vector<std::size_t> places = places_in(order, order.size());
  std::vector<std::vector<UnitId>> followers(order.size());
  std::vector<std::size_t> waits_for(order.size());
  for (const std::vector<UnitId>& each : orders)
    for (std::size_t i = 1; i < each.size(); ++i) {
      followers[each[i - 1]].push_back(each[i]);
      ++waits_for[each[i]];
    }
  std::set<std::size_t> free;  // places of units that may come next
  for (const UnitId unit : order)
    if (waits_for[unit] == 0) free.insert(places[unit]);
  std::vector<UnitId> result;
  std::vector<bool> taken(order.size());
  const auto take = [&](UnitId unit) {
    taken[unit] = true;
    result.push_back(unit);
    for (const UnitId next : followers[unit])
      if (--waits_for[next] == 0 && !taken[next]) free.insert(places[next]);
  };
  for (const UnitId first : order) {
    while (!free.empty()) take(order[free.extract(free.begin()).value()]);
    if (!taken[first]) take(first);  // the orders contradict each other
  }
  return result;
}

Turns::Turns(std::size_t units) : order_(units), misled_(units) {
  std::iota(order_.rbegin(), order_.rend(), UnitId{0});
}

void Turns::begin_step(const OfRanks& read) {
  read_ = read;
  ready_.assign(read.size(), {});
  was_.assign(read.size(), std::vector<bool>(order_.size()));
  OfRanks expected = read;
  for (std::vector<UnitId>& units : expected) {
    std::erase_if(units, [this](UnitId unit) { return misled_[unit]; });
    std::ranges::reverse(units);
  }
  order_ = merged(order_, expected);
}

void Turns::follow(const OfRanks& ready) {
  for (std::size_t rank = 0; rank < ready.size(); ++rank) {
    std::vector<UnitId> fresh;
    for (const UnitId unit : ready[rank])
      if (!was_[rank][unit]) fresh.push_back(unit);
    // Units that are updated together become ready at once, in no order.
    if (fresh.size() > 1)
      std::ranges::sort(fresh, {},
                        [places = places_in(order_, order_.size())](UnitId unit) { return places[unit]; });
    for (const UnitId unit : fresh) was_[rank][unit] = true;
    ready_[rank].insert(ready_[rank].end(), fresh.begin(), fresh.end());
  }
}

void Turns::end_step() {
  for (std::size_t rank = 0; rank < read_.size(); ++rank) find_misled(read_[rank], ready_[rank]);
  learn();
}

void Turns::learn() { order_ = merged(order_, ready_); }

// What is not misled became ready in the order that was expected, whatever came in between.
void Turns::find_misled(const std::vector<UnitId>& read, const std::vector<UnitId>& ready) {
  const std::vector<std::size_t> places = places_in(read, order_.size());
  std::vector<UnitId> as_expected;
  for (const UnitId unit : ready) {
    if (places[unit] == read.size()) continue;
    bool is_misled = false;
    for (; !as_expected.empty() && places[as_expected.back()] < places[unit]; as_expected.pop_back())
      is_misled = misled_[as_expected.back()] = true;
    if (is_misled)
      misled_[unit] = true;
    else
      as_expected.push_back(unit);
  }
}

}  // namespace sluice::engine
