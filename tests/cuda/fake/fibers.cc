#include "cuda/fake/fibers.h"

#include <cuda.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
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

// Where a fiber goes on. The compiler's own jumps take a few instructions, and those of the C library, which
// look at what is to be cleaned up, took a tenth of the time of tests on the fake GPU.
using Place = void* [5];

struct Fiber {
  ucontext_t context;  // where it begins
  Place place;
  bool has_begun = false;
  State state = State::kReady;
  std::array<std::uint64_t, 2> offered = {};  // in exchanges that follow each other
  unsigned exchanges = 0;
};

// A block of threads while it runs. There is one at a time on a thread of the CPU.
class Block {
 public:
  Block(const Kernel& kernel, const void* arguments, std::size_t threads)
      : kernel_(kernel),
        arguments_(arguments),
        fibers_(threads),
        order_(threads),
        stacks_(std::make_unique_for_overwrite<char[]>(threads * kStack)) {
    std::iota(order_.begin(), order_.end(), 0);
    for (std::size_t i = 0; i < threads; ++i) prepare(i);
  }

  // Between barriers, threads run in an order that is shuffled for each block, from another one of them on.
  void run(unsigned index, std::mt19937_64& random) {
    blockIdx = {index};
    std::shuffle(order_.begin(), order_.end(), random);
    for (Fiber& fiber : fibers_) fiber.state = State::kReady, fiber.exchanges = 0;
    while (!all_are(State::kDone, 0, fibers_.size())) {
      const std::size_t first = random() % order_.size();
      bool has_run = false;
      for (std::size_t i = first; i < order_.size(); ++i) has_run |= go_on(order_[i]);
      for (std::size_t i = 0; i < first; ++i) has_run |= go_on(order_[i]);
      const bool is_freed = free_block() | free_warps();
      if (!has_run && !is_freed)
        throw Refusal{CUDA_ERROR_LAUNCH_FAILED,
                      "threads of a block wait at a barrier that others do not reach"};
    }
  }
  // (noipa: callers believe of no register that it is kept, as other fibers run meanwhile.)
  [[gnu::noipa]] void wait(State at) {
    Fiber& fiber = fibers_[current_];
    fiber.state = at;
    if (__builtin_setjmp(fiber.place) == 0) jump(scheduler_);
  }
  // An offer overwrites the one of two exchanges before, at which all have looked.
  std::uint64_t exchange(std::uint64_t bits, unsigned mask) {
    const std::size_t me = current_;
    const unsigned turn = fibers_[me].exchanges++ % 2;
    fibers_[me].offered[turn] = bits;
    wait(State::kAtWarp);
    return fibers_[me ^ mask].offered[turn];
  }

  static thread_local Block* running;

 private:
  [[gnu::noipa, noreturn]] static void jump(Place& place) { __builtin_longjmp(place, 1); }
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
    run_until_it_waits(fibers_[i]);
    return true;
  }
  [[gnu::noipa]] void run_until_it_waits(Fiber& fiber) {
    if (__builtin_setjmp(scheduler_) != 0) return;
    if (fiber.has_begun) jump(fiber.place);
    fiber.has_begun = true;
    ::setcontext(&fiber.context);
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
  std::vector<std::size_t> order_;
  std::unique_ptr<char[]> stacks_;
  Place scheduler_;
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
std::uint64_t exchange_in_warp(std::uint64_t bits, unsigned mask) {
  return Block::running->exchange(bits, mask);
}

}  // namespace sluice::fake_cuda
