#pragma once
#include <deque>

#include "tests/bindings/c/support.h"

namespace sluice_c_test {

using RanksHandle = std::unique_ptr<sluice_ranks, decltype(&sluice_ranks_destroy)>;

// A network of the caller, in which a packet is an array in a queue.
class Network {
 public:
  struct End {
    Network* network;
    uint32_t rank;
    std::map<std::thread::id, int> calls;
    bool woken = false;
  };
  explicit Network(uint32_t ranks) : ends_(ranks), queues_(ranks, Row(ranks)), left_(ranks) {
    for (uint32_t rank = 0; rank < ranks; ++rank) ends_[rank] = {this, rank, {}, false};
  }
  sluice_links links(uint32_t rank) {
    sluice_links links = SLUICE_INIT(sluice_links);
    links.context = &ends_[rank];
    links.what = "the test's network";
    links.rank = rank;
    links.ranks = static_cast<uint32_t>(ends_.size());
    links.packet_bytes = 65536;
    links.send = send;
    links.receive = receive;
    links.wait = wait;
    links.wake = wake;
    links.gone = gone;
    links.destroy = destroy;
    return links;
  }
  // From now on that many sends succeed.
  void let_fail(int sends) { sends_left_ = sends; }
  // From now on the functions of one fail for packets to the other.
  void close(uint32_t from, uint32_t to) {
    const std::lock_guard lock(mutex_);
    closed_.emplace(from, to);
  }
  bool has_left(uint32_t rank) {
    const std::lock_guard lock(mutex_);
    return left_[rank];
  }
  // How often a rank's functions were called, but wake and destroy; and on how many threads.
  int calls_of(uint32_t rank) {
    const std::lock_guard lock(mutex_);
    int calls = 0;
    for (const auto& [thread, count] : ends_[rank].calls) calls += count;
    return calls;
  }
  std::size_t threads_of(uint32_t rank) {
    const std::lock_guard lock(mutex_);
    return ends_[rank].calls.size();
  }

 private:
  using Row = std::vector<std::deque<std::vector<char>>>;
  static End& end_of(void* context) {
    End& end = *static_cast<End*>(context);
    const std::lock_guard lock(end.network->mutex_);
    ++end.calls[std::this_thread::get_id()];
    return end;
  }
  static int send(void* context, uint32_t to, const void* head, size_t head_bytes, const void* body,
                  size_t body_bytes, uint32_t* sent) {
    End& end = end_of(context);
    Network& network = *end.network;
    if (network.sends_left_-- == 0) return 7;
    const std::lock_guard lock(network.mutex_);
    if (network.closed_.contains({end.rank, to})) return 8;
    auto& queue = network.queues_[end.rank][to];
    if (queue.size() >= 8) return 0;
    std::vector<char> packet(head_bytes + body_bytes);
    std::memcpy(packet.data(), head, head_bytes);
    if (body_bytes > 0) std::memcpy(packet.data() + head_bytes, body, body_bytes);
    queue.push_back(std::move(packet));
    *sent = 1;
    network.changed_.notify_all();
    return 0;
  }
  static int receive(void* context, uint32_t from, void* packet, size_t* bytes) {
    End& end = end_of(context);
    const std::lock_guard lock(end.network->mutex_);
    auto& queue = end.network->queues_[from][end.rank];
    if (queue.empty()) return 0;
    std::memcpy(packet, queue.front().data(), queue.front().size());
    *bytes = queue.front().size();
    queue.pop_front();
    end.network->changed_.notify_all();
    return 0;
  }
  static int wait(void* context, uint64_t microseconds) {
    End& end = end_of(context);
    std::unique_lock lock(end.network->mutex_);
    if (!end.woken)
      end.network->changed_.wait_for(lock,
                                     std::chrono::microseconds(std::min<uint64_t>(microseconds, 100000)));
    end.woken = false;
    return 0;
  }
  static void wake(void* context) {
    End& end = *static_cast<End*>(context);
    const std::lock_guard lock(end.network->mutex_);
    end.woken = true;
    end.network->changed_.notify_all();
  }
  static int gone(void* context, uint32_t rank, const char** how, uint32_t* in_order) {
    End& end = end_of(context);
    if (!end.network->has_left(rank)) return 0;
    *how = "it has left the test's network";
    *in_order = 1;
    return 0;
  }
  static void destroy(void* context) {
    End& end = *static_cast<End*>(context);
    const std::lock_guard lock(end.network->mutex_);
    end.network->left_[end.rank] = true;
    end.network->changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<End> ends_;
  std::vector<Row> queues_;  // from, to
  std::vector<bool> left_;
  std::set<std::pair<uint32_t, uint32_t>> closed_;
  std::atomic<int> sends_left_{-1};
};

}  // namespace sluice_c_test
