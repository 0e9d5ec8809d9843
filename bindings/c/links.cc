#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "bindings/c/ranks_handle.h"
#include "comm/packet.h"
#include "core/log.h"

// Links over the caller's functions.
namespace sluice::c {
namespace {

class CallerLinks final : public comm::Links {
 public:
  CallerLinks(const sluice_links& functions, std::shared_ptr<FunctionClock> clock)
      : functions_(functions),
        clock_(std::move(clock)),
        what_(functions.what),
        packet_(functions.packet_bytes) {}
  ~CallerLinks() override {
    if (owns_) functions_.destroy(functions_.context);
  }
  // From now on destroying this object destroys the caller's links.
  void own() { owns_ = true; }

  int rank() const override { return static_cast<int>(functions_.rank); }
  int size() const override { return static_cast<int>(functions_.ranks); }
  std::size_t packet_bytes() const override { return packet_.size(); }

  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) override {
    check_wait();
    uint32_t sent = 0;
    const Called called(*clock_);
    check(functions_.send(functions_.context, static_cast<uint32_t>(to), head.data(), head.size(),
                          body.data(), body.size(), &sent),
          "send to", to);
    return sent != 0;
  }

  bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) override {
    check_wait();
    std::size_t bytes = 0;
    {
      const Called called(*clock_);
      check(functions_.receive(functions_.context, static_cast<uint32_t>(from), packet_.data(), &bytes),
            "receive from", from);
    }
    if (bytes == 0) return false;
    if (bytes > packet_.size())
      fail(ErrorCode::kIo, "{} of rank {} brought a packet of {} bytes, and the most is {}", what_, rank(),
           bytes, packet_.size());
    take(std::span(packet_).first(bytes));
    return true;
  }

  // The transport learns of a failed wait from the next packet.
  void wait(Clock::time_point until) override {
    const auto left = std::max(until - Clock::now(), Clock::duration(0));
    const auto micros = std::chrono::ceil<std::chrono::microseconds>(left).count();
    const Called called(*clock_, left);
    if (failed_wait_ == 0)
      failed_wait_ = functions_.wait(functions_.context, static_cast<uint64_t>(micros));
    else
      std::this_thread::sleep_for(std::min<Clock::duration>(left, std::chrono::milliseconds(1)));
  }
  void wake() override { functions_.wake(functions_.context); }

  std::optional<Gone> gone(int other) override {
    const char* how = nullptr;
    uint32_t in_order = 0;
    const Called called(*clock_);
    check(functions_.gone(functions_.context, static_cast<uint32_t>(other), &how, &in_order), "ask for",
          other);
    if (how == nullptr) return std::nullopt;
    return Gone{in_order != 0, how};
  }

 private:
  // Marks that a function of the caller is running, which may take `time`.
  struct Called {
    explicit Called(FunctionClock& the_clock, Clock::duration time = {}) : clock(the_clock) {
      clock.begin(Clock::now() + time);
    }
    ~Called() { clock.end(); }
    FunctionClock& clock;
  };
  void check(int result, const char* verb, int other) const {
    if (result != 0)
      fail(ErrorCode::kIo, "{} of rank {} could not {} rank {}: the function returned {}", what_, rank(),
           verb, other, result);
  }
  void check_wait() const {
    if (failed_wait_ != 0)
      fail(ErrorCode::kIo, "{} of rank {} could not wait: the function returned {}", what_, rank(),
           failed_wait_);
  }

  const sluice_links functions_;
  const std::shared_ptr<FunctionClock> clock_;
  const std::string what_;
  std::vector<std::byte> packet_;
  int failed_wait_ = 0;
  bool owns_ = false;
};

sluice_links checked(const sluice_links* given) {
  constexpr uint64_t kMostPacket = uint64_t{1} << 30;
  const sluice_links links = known_part(given, "links");
  if (links.ranks < 2 || links.ranks > 4096 || links.rank >= links.ranks)
    fail(ErrorCode::kInvalidArgument,
         "links of rank {} of {} are given; there are 2 to 4096 ranks, from 0 on", links.rank, links.ranks);
  if (links.packet_bytes < comm::kLeastPacket || links.packet_bytes > kMostPacket)
    fail(ErrorCode::kInvalidArgument, "links.packet_bytes is {}; state {} to {}", links.packet_bytes,
         comm::kLeastPacket, kMostPacket);
  if (links.host != nullptr && links.packet_bytes < comm::kLeastGreeting)
    fail(ErrorCode::kInvalidArgument,
         "links.packet_bytes is {}; with links.host, state {} or more, for what ranks tell each other first",
         links.packet_bytes, comm::kLeastGreeting);
  required(links.what, "links.what");
  required(links.send, "links.send");
  required(links.receive, "links.receive");
  required(links.wait, "links.wait");
  required(links.wake, "links.wake");
  required(links.gone, "links.gone");
  required(links.destroy, "links.destroy");
  return links;
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_ranks_create_links(const sluice_links* links, const sluice_ranks_options* options,
                                        sluice_ranks** ranks) {
  return guarded([&] {
    sluice_ranks*& out = required(ranks, "ranks");
    const sluice::comm::Deadlines deadlines = deadlines_of(options);
    const auto clock = std::make_shared<FunctionClock>(deadlines.silence);
    const sluice_links known = checked(links);
    auto made = std::make_unique<CallerLinks>(known, clock);
    CallerLinks& own = *made;
    const std::uint64_t bytes = own.packet_bytes();
    if (known.host == nullptr) {
      out = new sluice_ranks(std::move(made), deadlines, bytes);
      out->functions = clock;
      return own.own();
    }
    auto joined = sluice::comm::make_host_links(std::move(made), kRing, deadlines.patience, known.host);
    if (!joined.note.empty())
      sluice::log().warn("{}; they exchange bytes through {}", joined.note, known.what);
    const bool all_here = joined.all_here;
    const std::uint64_t memory = joined.memory;
    out = new sluice_ranks(std::move(joined), deadlines, memory + (all_here ? 0 : bytes));
    if (all_here) return known.destroy(known.context);
    out->functions = clock;
    own.own();
  });
}
