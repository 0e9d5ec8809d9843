#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/links.h"
#include "comm/packet.h"
#include "core/error.h"
#include "core/transfers.h"

namespace sluice::comm {

struct Failure {
  int rank;  // the rank that failed first
  ErrorCode code;
  std::string text;
};

// A request of any thread to the transport's thread.
struct Order {
  enum Kind { kSend, kReceive, kRead, kAnswer, kRefusal, kServe, kFail } kind;
  int peer = 0;
  std::uint64_t tag = 0;
  Call call{};
  std::span<const std::byte> from{};
  std::span<std::byte> into{};
  Head request{};
  Server server{};
  Done done{};
  ErrorCode code = ErrorCode::kInternal;
  std::string text{};
};

// The queue of requests to the transport's thread. It outlives the transport, since a server may answer
// later.
class Inbox {
 public:
  explicit Inbox(Links& links) : links_(&links) {}

  // Returns false and leaves the order unchanged where the transport has been destroyed.
  bool post(Order&& order) {
    const std::lock_guard lock(mutex_);
    if (links_ == nullptr) return false;
    orders_.push_back(std::move(order));
    if (orders_.size() == 1) links_->wake();
    return true;
  }
  void take(std::vector<Order>& orders) {
    const std::lock_guard lock(mutex_);
    orders_.swap(orders);
  }
  void stop() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    links_->wake();
  }
  bool stopping() const {
    const std::lock_guard lock(mutex_);
    return stopping_;
  }
  void close() {
    const std::lock_guard lock(mutex_);
    links_ = nullptr;
  }
  // Keeps the first failure only, and returns it.
  Failure fail(Failure failure) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    return *failure_;
  }
  std::optional<Failure> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  void describe(int rank, std::string text) {
    const std::lock_guard lock(mutex_);
    texts_[rank] = std::move(text);
  }
  std::string name_of(int rank) const {
    const std::lock_guard lock(mutex_);
    const auto text = texts_.find(rank);
    if (text == texts_.end() || text->second.empty()) return fmt::format("rank {}", rank);
    return fmt::format("rank {} ({})", rank, text->second);
  }

 private:
  mutable std::mutex mutex_;
  Links* links_;
  std::vector<Order> orders_;
  bool stopping_ = false;
  std::optional<Failure> failure_;
  std::map<int, std::string> texts_;  // by rank
};

}  // namespace sluice::comm
