#include "comm/faulty_links.h"

#include <algorithm>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace sluice::comm {
namespace {

class FaultyLinks final : public Links {
 public:
  FaultyLinks(std::unique_ptr<Links> inner, const LinkFaults& faults)
      : inner_(std::move(inner)),
        faults_(faults),
        random_(faults.seed * 1000 + static_cast<std::uint64_t>(inner_->rank())),
        held_(static_cast<std::size_t>(inner_->size())) {}
  // Packets that were sent arrive, as if they had been on their way.
  ~FaultyLinks() override {
    const auto until = Clock::now() + std::chrono::seconds(10);
    for (int to = 0; to < inner_->size(); ++to)
      while (!held_[static_cast<std::size_t>(to)].empty() && !inner_->gone(to) && Clock::now() < until)
        if (!release(to, true)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::size_t packet_bytes() const override { return std::min(faults_.packet_bytes, inner_->packet_bytes()); }

  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) override {
    auto& held = held_[static_cast<std::size_t>(to)];
    if (to == faults_.cut_rank && sent_++ >= faults_.cut_after) {
      held.clear();
      return true;
    }
    release(to, false);
    if (happens(faults_.refused) || held.size() >= kMostHeld) return false;
    if (held.empty() && !happens(faults_.held_back)) return inner_->send(to, head, body);
    Packet packet{{}, Clock::now() + delay()};
    packet.bytes.insert(packet.bytes.end(), head.begin(), head.end());
    packet.bytes.insert(packet.bytes.end(), body.begin(), body.end());
    held.push_back(std::move(packet));
    return true;
  }
  bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) override {
    return !is_cut(from) && inner_->receive(from, take);
  }
  void wait(Clock::time_point until) override {
    for (int to = 0; to < inner_->size(); ++to) {
      release(to, false);
      if (!held_[static_cast<std::size_t>(to)].empty())
        until = std::min(until, std::max(held_[static_cast<std::size_t>(to)].front().due,
                                         Clock::now() + std::chrono::microseconds(100)));
    }
    // A refused send is tried again soon, since nobody else makes room.
    if (faults_.refused > 0) until = std::min(until, Clock::now() + std::chrono::milliseconds(1));
    if (!happens(faults_.needless_return)) inner_->wait(until);
  }
  void wake() override { inner_->wake(); }
  std::optional<Gone> gone(int rank) override {
    return is_cut(rank) ? Gone{false, "the connection with it was cut"} : inner_->gone(rank);
  }

 private:
  static constexpr std::size_t kMostHeld = 32;
  struct Packet {
    std::vector<std::byte> bytes;
    Clock::time_point due;
  };

  bool is_cut(int rank) const { return rank == faults_.cut_rank && sent_ > faults_.cut_after; }
  bool happens(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }
  std::chrono::microseconds delay() {
    return std::chrono::microseconds(
        std::uniform_int_distribution<unsigned>(0, faults_.most_microseconds)(random_));
  }
  // Sends what is due. Returns whether it sent anything.
  bool release(int to, bool all) {
    auto& held = held_[static_cast<std::size_t>(to)];
    bool sent = false;
    while (!held.empty() && (all || held.front().due <= Clock::now()) &&
           inner_->send(to, held.front().bytes, {})) {
      held.pop_front();
      sent = true;
    }
    return sent;
  }

  const std::unique_ptr<Links> inner_;
  const LinkFaults faults_;
  std::mt19937_64 random_;
  std::uint64_t sent_ = 0;                // packets to the rank with which the connection is to be cut
  std::vector<std::deque<Packet>> held_;  // by the other rank
};

}  // namespace

std::unique_ptr<Links> make_faulty_links(std::unique_ptr<Links> inner, const LinkFaults& faults) {
  return std::make_unique<FaultyLinks>(std::move(inner), faults);
}

}  // namespace sluice::comm
