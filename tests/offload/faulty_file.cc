#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "offload/test_files.h"
#include "offload/transfer.h"

namespace sluice::offload {
namespace {

using Clock = std::chrono::steady_clock;

// A thread that calls functions a fixed time after they were added, in their order.
class DelayLine {
 public:
  explicit DelayLine(std::chrono::microseconds delay) : delay_(delay), thread_([this] { work(); }) {}
  ~DelayLine() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back({Clock::now() + delay_, std::move(call)});
    changed_.notify_all();  // under the lock, since the call may end this object once the lock is free
  }

 private:
  struct Call {
    Clock::time_point due;
    std::function<void()> call;
  };

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !calls_.empty(); });
      if (calls_.empty()) return;
      Call next = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(next.due);
      next.call();
      next.call = nullptr;  // destroys what it holds before the lock is taken
      lock.lock();
    }
  }

  const std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  bool stopping_ = false;
  std::thread thread_;
};

// Decides what goes wrong with one transfer, by the seed and the transfer's number alone.
class Fate {
 public:
  Fate(const Faults& faults, std::uint64_t number, Direction direction) : random_(faults.seed, number) {
    const bool reading = direction == Direction::kRead;
    const auto words = random_.block(0);
    beyond_ = number >= faults.fail_after;
    error_ = to_unit_interval(words[0]) < (reading ? faults.read_error : faults.write_error);
    flip_ = to_unit_interval(words[1]) < (reading ? faults.read_flip : faults.write_flip);
    lost_ = !reading && to_unit_interval(words[2]) < faults.lost_write;
    error_number_ = beyond_ && !reading ? ENOSPC : EIO;
    truncates_ = number == faults.truncate_after;
  }
  bool fails() const { return beyond_ || error_; }
  int error_number() const { return error_number_; }
  bool lost() const { return lost_; }
  bool truncates() const { return truncates_; }
  bool any() const { return beyond_ || error_ || flip_ || lost_ || truncates_; }
  bool flips() const { return flip_; }
  void flip(std::span<std::byte> bytes) const {
    if (bytes.empty()) return;
    const auto words = random_.block(1);
    const std::uint64_t at = (std::uint64_t{words[0]} << 32 | words[1]) % bytes.size();
    bytes[at] ^= std::byte{1} << (words[2] % 8);
  }

 private:
  CounterRandom random_;
  bool beyond_, error_, flip_, lost_, truncates_;
  int error_number_;
};

// Copies bytes to memory from which O_DIRECT can write.
std::shared_ptr<std::byte> aligned_copy(std::span<const std::byte> from) {
  void* memory = std::aligned_alloc(kDiskBlock, from.size());
  if (memory == nullptr) throw std::bad_alloc();
  std::memcpy(memory, from.data(), from.size());
  return {static_cast<std::byte*>(memory), [](std::byte* bytes) { std::free(bytes); }};
}

class FaultyFile final : public ForwardingFile {
 public:
  FaultyFile(File& inner, const Faults& faults, std::atomic<std::uint64_t>* injected)
      : ForwardingFile(inner), faults_(faults), injected_(injected) {
    if (faults.delay_microseconds > 0)
      delay_ = std::make_unique<DelayLine>(std::chrono::microseconds(faults.delay_microseconds));
  }
  ~FaultyFile() override { open_.wait(); }

  void read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency urgency) override;
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency urgency) override;

 private:
  // Decides what goes wrong with the next transfer. Where the file is to be cut, cuts it first.
  Fate next_fate(Direction direction);
  // Wraps the Done, so that its transfer is counted and, where that is asked for, delayed.
  Done outgoing(Done done);

  const Faults faults_;
  std::atomic<std::uint64_t>* const injected_;
  std::atomic<std::uint64_t> count_{0};
  OpenTransfers open_;
  std::unique_ptr<DelayLine> delay_;
};

Fate FaultyFile::next_fate(Direction direction) {
  const Fate fate(faults_, count_++, direction);
  if (fate.any() && injected_ != nullptr) ++*injected_;
  if (fate.truncates()) inner_.allocate(inner_.size() / 2 / kDiskBlock * kDiskBlock);
  return fate;
}

Done FaultyFile::outgoing(Done done) {
  open_.begin();
  Done counted = [this, done = std::move(done)](std::exception_ptr error) mutable {
    done(std::move(error));
    done = nullptr;
    open_.end();
  };
  if (delay_ == nullptr) return counted;
  return [this, counted = std::move(counted)](std::exception_ptr error) mutable {
    delay_->add([counted = std::move(counted), error] { counted(error); });
  };
}

void FaultyFile::read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency urgency) {
  check_aligned(name(), Direction::kRead, offset, into.data(), into.size());
  const Fate fate = next_fate(Direction::kRead);
  Done out = outgoing(std::move(done));
  if (fate.fails())
    return out(transfer_error(name(), Direction::kRead, offset, into.size(), fate.error_number()));
  if (!fate.flips()) return inner_.read(offset, into, std::move(out), urgency);
  inner_.read(
      offset, into,
      [fate, into, out = std::move(out)](std::exception_ptr error) {
        if (error == nullptr) fate.flip(into);
        out(std::move(error));
      },
      urgency);
}

void FaultyFile::write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency urgency) {
  check_aligned(name(), Direction::kWrite, offset, from.data(), from.size());
  const Fate fate = next_fate(Direction::kWrite);
  Done out = outgoing(std::move(done));
  if (fate.fails())
    return out(transfer_error(name(), Direction::kWrite, offset, from.size(), fate.error_number()));
  if (fate.lost()) return out(nullptr);
  if (!fate.flips() || from.empty()) return inner_.write(offset, from, std::move(out), urgency);
  const std::shared_ptr<std::byte> copy = aligned_copy(from);
  const std::span<std::byte> bytes(copy.get(), from.size());
  fate.flip(bytes);
  inner_.write(
      offset, bytes, [copy, out = std::move(out)](std::exception_ptr error) { out(std::move(error)); },
      urgency);
}

}  // namespace

std::unique_ptr<File> make_faulty_file(File& inner, const Faults& faults,
                                       std::atomic<std::uint64_t>* injected) {
  return std::make_unique<FaultyFile>(inner, faults, injected);
}

}  // namespace sluice::offload
