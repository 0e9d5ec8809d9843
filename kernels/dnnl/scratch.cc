// The memory that oneDNN packs operands into. glibc's posix_memalign (before 2.38) seldom reuses a block that
// was just freed, since the pieces cut off at its ends may be in use: the heap grows by an amount that no
// plan can predict. So the plug-in defines these two functions itself. It is loaded with RTLD_DEEPBIND:
// oneDNN, and libraries first loaded with it, find them before libc's, and the rest of the process does not
// see them.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "core/bytes.h"

namespace sluice::kernels {
namespace {

constexpr std::size_t kPage = 4 * kKiB;
constexpr std::size_t kLeast = 64 * kKiB;  // smaller blocks are left to libc

struct Block {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool used = false;
};

// A pool of as many blocks as were ever in use at once, each as large as its largest use. Thread rule: any
// thread.
class Scratch {
 public:
  // Returns null where the system has no memory.
  void* take(std::size_t bytes) noexcept try {
    const std::lock_guard lock(mutex_);
    Block* block = closest(bytes);
    if (!block) block = &blocks_.emplace_back();
    if (block->bytes < bytes && !enlarge(*block, round_up(bytes, kPage))) return nullptr;
    block->used = true;
    return block->data;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }

  bool give_back(const void* data) {
    const std::lock_guard lock(mutex_);
    for (Block& block : blocks_)
      if (block.data == data) {
        block.used = false;
        return true;
      }
    return false;
  }

 private:
  // Of the unused blocks, returns the smallest that is large enough, or else the largest.
  Block* closest(std::size_t bytes) {
    Block* found = nullptr;
    for (Block& block : blocks_) {
      if (block.used) continue;
      const bool fits = block.bytes >= bytes, found_fits = found && found->bytes >= bytes;
      if (!found || (fits && !found_fits) || (fits == found_fits && (block.bytes < found->bytes) == fits))
        found = &block;
    }
    return found;
  }

  static bool enlarge(Block& block, std::size_t bytes) {
    if (block.data) munmap(block.data, block.bytes);
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    block = data == MAP_FAILED ? Block{} : Block{static_cast<std::byte*>(data), bytes, false};
    return block.data != nullptr;
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
};

// Never destroyed, since OpenMP's threads outlive all static objects.
Scratch& scratch() {
  static Scratch& made = *new Scratch;
  return made;
}

template <class Function>
Function following(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace
}  // namespace sluice::kernels

extern "C" {

__attribute__((visibility("default"))) int posix_memalign(void** out, std::size_t alignment,
                                                          std::size_t bytes) noexcept {
  using namespace sluice::kernels;
  if (bytes < kLeast || alignment > kPage) {
    static const auto libc = following<decltype(&posix_memalign)>("posix_memalign");
    return libc(out, alignment, bytes);
  }
  void* taken = scratch().take(bytes);
  if (!taken) return ENOMEM;
  *out = taken;
  return 0;
}

__attribute__((visibility("default"))) void free(void* data) noexcept {
  using namespace sluice::kernels;
  static const auto libc = following<decltype(&free)>("free");
  if (data && !scratch().give_back(data)) libc(data);
}
}
