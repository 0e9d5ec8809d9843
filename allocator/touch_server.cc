#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/home.h"
#include "allocator/range_registry.h"
#include "core/error.h"

namespace sluice::allocator {
namespace {

enum Stage : std::uint32_t { kFree, kFilling, kAsked, kServed, kRefused };

// The request of one faulting thread.
struct Request {
  std::atomic<std::uint32_t> stage{kFree};
  TouchServer::Touch touch = {};
  char reason[400] = {};  // why it was refused; such a request is never reused, since the process ends
};
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

// A direct system call, because the C library's waiting functions are not async-signal-safe.
void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  (void)::syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

constexpr std::uint8_t kStop = 255;

}  // namespace

struct TouchServer::State : TouchService {
  explicit State(BringIn action) : act(std::move(action)) {
    if (::pipe(ends) != 0)
      fail(ErrorCode::kIo, "cannot make a pipe for touches of absent parameters: {}", errno_text(errno));
  }
  ~State() override {
    ::close(ends[0]);
    ::close(ends[1]);
  }

  const char* bring_in(std::uintptr_t address, bool write) noexcept override;
  void send(std::uint8_t index) const noexcept;
  void run();
  void serve(Request& request) noexcept;

  BringIn act;
  int ends[2] = {-1, -1};
  std::array<Request, 64> requests;
  std::atomic<std::uint64_t> served{0};
  std::vector<const std::byte*> homes;
  std::thread thread;
};

void TouchServer::State::send(std::uint8_t index) const noexcept {
  while (::write(ends[1], &index, 1) < 0 && errno == EINTR) {
  }
}

const char* TouchServer::State::bring_in(std::uintptr_t address, bool write) noexcept {
  while (true) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Request& request = requests[i];
      std::uint32_t expected = kFree;
      if (!request.stage.compare_exchange_strong(expected, kFilling)) continue;
      request.touch = {reinterpret_cast<std::byte*>(address), write, ::gettid()};  // NOLINT: what was touched
      request.stage = kAsked;
      send(static_cast<std::uint8_t>(i));
      while (request.stage == kAsked) futex(request.stage, FUTEX_WAIT, kAsked);
      if (request.stage == kRefused) return request.reason;
      request.stage = kFree;
      return nullptr;
    }
    ::sched_yield();
  }
}

void TouchServer::State::serve(Request& request) noexcept {
  const auto refuse = [&](std::string_view why) {
    request.reason[why.copy(request.reason, sizeof request.reason - 1)] = '\0';
    request.stage = kRefused;
  };
  try {
    const std::string why = act(request.touch);
    if (!why.empty()) return refuse(why);
    ++served;
    request.stage = kServed;
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void TouchServer::State::run() {
  std::uint8_t index = 0;
  while (true) {
    const ssize_t n = ::read(ends[0], &index, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0 || index == kStop) return;
    Request& request = requests[index];
    serve(request);
    futex(request.stage, FUTEX_WAKE, 1);
  }
}

TouchServer::TouchServer(BringIn bring_in) : state_(std::make_unique<State>(std::move(bring_in))) {
  install_touch_reporter();
  state_->thread = std::thread([state = state_.get()] { state->run(); });
}

TouchServer::~TouchServer() {
  for (const std::byte* home : state_->homes)
    if (RegisteredRange* range = range_that_begins_at(home); range != nullptr) {
      TouchService* mine = state_.get();
      range->service.compare_exchange_strong(mine, nullptr);
    }
  state_->send(kStop);
  state_->thread.join();
}

void TouchServer::serve(const Home& home) {
  RegisteredRange* range = range_that_begins_at(home.data());
  ensure(range != nullptr, "the home '{}' is not registered", home.name());
  range->service = state_.get();
  state_->homes.push_back(home.data());
}

std::uint64_t TouchServer::served() const { return state_->served; }

}  // namespace sluice::allocator
