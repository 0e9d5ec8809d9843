#include "cuda/fake/fibers.h"

#include <cuda.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/fake/memory.h"

thread_local sluice::fake_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

namespace sluice::fake_cuda {
namespace {

constexpr std::size_t kStack = std::size_t{64} << 10, kWarp = 32;

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on: a jump, unlike swapcontext(), makes no system call
  bool has_begun = false;
  State state = State::kReady;
  std::uint32_t offered = 0;
};

// A block of threads while it runs. There is one at a time on a thread of the CPU.
class Block {
 public:
  Block(const Kernel& kernel, const void* arguments, std::size_t threads)
      : kernel_(kernel),
        arguments_(arguments),
        fibers_(threads),
        stacks_(std::make_unique_for_overwrite<char[]>(threads * kStack)) {
    for (std::size_t i = 0; i < threads; ++i) prepare(i);
  }

  void run(unsigned index, std::mt19937_64& random) {
    blockIdx = {index};
    std::vector<std::size_t> order(fibers_.size());
    std::iota(order.begin(), order.end(), 0);
    for (Fiber& fiber : fibers_) fiber.state = State::kReady;
    while (!all_are(State::kDone, 0, fibers_.size())) {
      std::shuffle(order.begin(), order.end(), random);
      bool has_run = false;
      for (const std::size_t i : order) has_run |= go_on(i);
      const bool is_freed = free_block() | free_warps();
      if (!has_run && !is_freed)
        throw Refusal{CUDA_ERROR_LAUNCH_FAILED,
                      "threads of a block wait at a barrier that others do not reach"};
    }
  }
  void wait(State at) {
    fibers_[current_].state = at;
    if (_setjmp(fibers_[current_].place) == 0) _longjmp(scheduler_, 1);
  }
  std::uint32_t exchange(std::uint32_t bits, unsigned mask) {
    const std::size_t me = current_;
    fibers_[me].offered = bits;
    wait(State::kAtWarp);
    const std::uint32_t other = fibers_[me ^ mask].offered;
    wait(State::kAtWarp);  // nobody offers anew before all have looked
    return other;
  }

  static thread_local Block* running;

 private:
  static void enter() {
    while (true) {  // block after block
      running->kernel_.body(running->arguments_);
      running->wait(State::kDone);
    }
  }
  void prepare(std::size_t i) {
    Fiber& fiber = fibers_[i];
    ::getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks_.get() + i * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    ::makecontext(&fiber.context, enter, 0);
  }
  bool go_on(std::size_t i) {
    if (fibers_[i].state != State::kReady) return false;
    current_ = i;
    threadIdx = {static_cast<unsigned>(i)};
    if (_setjmp(scheduler_) != 0) return true;  // it waits now
    if (fibers_[i].has_begun) _longjmp(fibers_[i].place, 1);
    fibers_[i].has_begun = true;
    ::setcontext(&fibers_[i].context);
    throw Refusal{CUDA_ERROR_LAUNCH_FAILED, "a thread of a block cannot begin"};
  }
  bool all_are(State state, std::size_t begin, std::size_t end) const {
    return std::all_of(fibers_.begin() + static_cast<std::ptrdiff_t>(begin),
                       fibers_.begin() + static_cast<std::ptrdiff_t>(end),
                       [state](const Fiber& fiber) { return fiber.state == state; });
  }
  bool free(State barrier, std::size_t begin, std::size_t end) {
    if (!all_are(barrier, begin, end)) return false;
    for (std::size_t i = begin; i < end; ++i) fibers_[i].state = State::kReady;
    return true;
  }
  bool free_block() { return free(State::kAtBlock, 0, fibers_.size()); }
  bool free_warps() {
    bool is_freed = false;
    for (std::size_t begin = 0; begin < fibers_.size(); begin += kWarp)
      is_freed |= free(State::kAtWarp, begin, std::min(begin + kWarp, fibers_.size()));
    return is_freed;
  }

  const Kernel& kernel_;
  const void* arguments_;
  std::vector<Fiber> fibers_;
  std::unique_ptr<char[]> stacks_;
  jmp_buf scheduler_;
  std::size_t current_ = 0;
};
thread_local Block* Block::running = nullptr;

}  // namespace

const Kernel* find_kernel(const char* name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : &found->second;
}
bool add_kernel(const char* name, Kernel kernel) { return kernels().emplace(name, kernel).second; }

void run_kernel(const Kernel& kernel, unsigned blocks, unsigned threads, const void* arguments,
                std::mt19937_64& random) {
  gridDim = {blocks};
  blockDim = {threads};
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random);
  Block block(kernel, arguments, threads);
  Block::running = &block;
  for (const unsigned index : order) block.run(index, random);
  Block::running = nullptr;
}

void wait_for_block() { Block::running->wait(State::kAtBlock); }
std::uint32_t exchange_in_warp(std::uint32_t bits, unsigned mask) {
  return Block::running->exchange(bits, mask);
}

}  // namespace sluice::fake_cuda
