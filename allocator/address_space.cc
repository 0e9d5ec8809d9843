#include "allocator/address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <utility>
#include <vector>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/system.h"

// Values of the kernel's interface, for older C libraries.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace sluice::allocator {
namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr std::size_t kSmallPage = 4096;
// Populating this much takes far longer than starting a thread.
constexpr std::size_t kWorthAThread = std::size_t{128} << 20;

void unmap(std::byte* data, std::size_t bytes) {
  if (bytes == 0) return;
  const int result = ::munmap(data, bytes);
  ensure(result == 0, "cannot unmap {} bytes at {}: {}", bytes, static_cast<void*>(data), errno_text(errno));
}

std::byte* reserve_aligned(std::size_t bytes, std::string_view name) {
  look_for_interrupt();  // a model of very many units has as many ranges
  const std::size_t wanted = bytes + kHugePage;
  void* mapped = ::mmap(nullptr, wanted, PROT_NONE, kReserved, -1, 0);
  if (mapped == MAP_FAILED)
    fail(ErrorCode::kBudget,
         "cannot reserve {} of addresses for '{}': {}; see 'ulimit -v' and /proc/sys/vm/max_map_count",
         format_size(bytes), name, errno_text(errno));
  auto* begin = static_cast<std::byte*>(mapped);
  const std::size_t before =
      round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage) - reinterpret_cast<std::uintptr_t>(begin);
  unmap(begin, before);
  unmap(begin + before + bytes, wanted - before - bytes);
  return begin + before;
}

void advise(std::byte* data, std::size_t bytes, int advice, bool needed) {
  if (::madvise(data, bytes, advice) == 0 || !needed) return;
  fail(ErrorCode::kIo, "the system refuses advice {} on {} of memory: {}", advice, format_size(bytes),
       errno_text(errno));
}

[[noreturn]] void fail_for_memory(std::size_t bytes, std::string_view what, std::string_view found) {
  fail(ErrorCode::kBudget, "the system cannot give {} for {}: {}; state a smaller budget or free memory",
       format_size(bytes), what, found);
}

void populate_by_this_thread(std::byte* data, std::size_t bytes, std::string_view what) {
  while (::madvise(data, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == ENOMEM) fail_for_memory(bytes, what, errno_text(errno));
    if (errno != EINVAL)
      fail(ErrorCode::kIo, "cannot populate {} for {}: {}", format_size(bytes), what, errno_text(errno));
    for (std::size_t i = 0; i < bytes; i += kSmallPage)
      *const_cast<volatile std::byte*>(data + i) = std::byte{0};
    return;
  }
}

// Each of so many threads populates a piece.
void populate_by_threads(std::byte* data, std::size_t bytes, std::size_t piece, std::string_view what) {
  std::vector<std::future<void>> others;
  for (std::size_t begin = piece; begin < bytes; begin += piece)
    others.push_back(
        std::async(std::launch::async | std::launch::deferred,  // deferred: no thread can be started
                   populate_by_this_thread, data + begin, std::min(piece, bytes - begin), what));
  populate_by_this_thread(data, std::min(piece, bytes), what);
  for (std::future<void>& other : others) other.get();
}

// The kernel clears pages in the calling thread, so several threads populate faster.
void populate(std::byte* data, std::size_t bytes, std::string_view what) {
  // Beyond a container's limit the kernel kills the process instead of returning an error. So the available
  // memory is checked first.
  if (const std::size_t available = available_memory_bytes(); bytes > available)
    fail_for_memory(bytes, what, fmt::format("{} are available", format_size(available)));
  const std::size_t threads =
      std::clamp<std::size_t>(bytes / kWorthAThread, 1, static_cast<std::size_t>(usable_cpus()));
  const std::size_t piece = std::min(kWorthAThread, round_up(divide_up(bytes, threads), kHugePage));
  for (std::size_t begin = 0; begin < bytes; begin += threads * piece) {
    look_for_interrupt();
    populate_by_threads(data + begin, std::min(threads * piece, bytes - begin), piece, what);
  }
}

void map_memory(std::byte* data, std::size_t bytes, std::string_view what) {
  if (::mmap(data, bytes, PROT_READ | PROT_WRITE, kReserved | MAP_FIXED, -1, 0) != data)
    fail_for_memory(bytes, what, errno_text(errno));
  advise(data, bytes, MADV_HUGEPAGE, false);
}

bool move_range(std::byte* from, std::byte* to, std::size_t bytes, Mremap mremap_call) {
  return mremap_call(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to;
}

[[noreturn]] void fail_to_move(std::size_t bytes, int error) {
  if (error == ENOMEM)
    fail(ErrorCode::kBudget,
         "cannot place {}: {}; this process may have too many mappings: raise /proc/sys/vm/max_map_count",
         format_size(bytes), errno_text(error));
  fail(ErrorCode::kIo, "cannot move {} of pages: {}; Linux 5.7 or later is needed (mremap, MREMAP_DONTUNMAP)",
       format_size(bytes), errno_text(error));
}

// A kernel that refuses to move a range of several mappings has already unmapped the target.
void reserve_target_again(std::byte* to, std::size_t bytes) {
  void* mapped = ::mmap(to, bytes, PROT_NONE, kReserved | MAP_FIXED_NOREPLACE, -1, 0);
  ensure(mapped == to, "the addresses at {} were lost to another mapping: {}", static_cast<void*>(to),
         errno_text(errno));
}

}  // namespace

Reservation::Reservation(std::size_t bytes, std::size_t used, RangeKind kind, std::string_view name)
    : Reservation(reserve_aligned(bytes, name), bytes, used, kind, name) {}

Reservation::Reservation(std::byte* data, std::size_t bytes, std::size_t used, RangeKind kind,
                         std::string_view name) {
  register_range(data, bytes, used, kind, name);
  range_ = std::unique_ptr<std::byte, GiveBack>(data, {bytes, true});
}

std::vector<Reservation> Reservation::adjoining(const std::vector<Part>& parts, std::size_t reserve,
                                                RangeKind kind) {
  std::size_t bytes = reserve;
  for (const Part& part : parts) bytes += part.used;
  std::vector<Reservation> made;
  made.reserve(parts.size());
  std::byte* begin = reserve_aligned(bytes, parts.front().name);
  for (const Part& part : parts) {
    const bool last = made.size() + 1 == parts.size();
    made.push_back(Reservation(begin, part.used + (last ? reserve : 0), part.used, kind, part.name));
    begin += part.used;
  }
  return made;
}

void Reservation::unregister() {
  unregister_range(data());
  range_.get_deleter().registered = false;
}

void Reservation::GiveBack::operator()(std::byte* data) const {
  if (registered)
    give_back_range(data, bytes);
  else
    unmap(data, bytes);
}

void give_back_range(std::byte* data, std::size_t bytes) {
  unregister_range(data);
  unmap(data, bytes);
}

void take_memory(std::byte* data, std::size_t bytes, std::string_view what) {
  map_memory(data, bytes, what);
  // MADV_DONTFORK would leave a hole in a child, which other mappings could fill before the child's fork
  // handler runs.
  advise(data, bytes, MADV_WIPEONFORK, true);
  advise(data, bytes, MADV_DONTDUMP, true);
  populate(data, bytes, what);
}

void take_ordinary_memory(std::byte* data, std::size_t bytes, std::string_view what) {
  map_memory(data, bytes, what);
  populate(data, bytes, what);
}

void drop_memory(std::byte* data, std::size_t bytes) { advise(data, bytes, MADV_DONTNEED, true); }

void make_absent(std::byte* data, std::size_t bytes) {
  if (bytes != 0 && ::mmap(data, bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0) != data)
    fail(ErrorCode::kIo, "cannot take {} of memory away: {}", format_size(bytes), errno_text(errno));
}

void move_pages(std::byte* from, std::byte* to, std::size_t bytes, std::size_t extent, Mremap mremap_call) {
  if (move_range(from, to, bytes, mremap_call)) return;
  int error = errno;
  if (error == EFAULT && bytes > extent) {
    reserve_target_again(to, bytes);
    std::size_t done = 0;
    while (done < bytes && move_range(from + done, to + done, extent, mremap_call)) done += extent;
    if (done == bytes) return;
    error = errno;
    for (std::size_t i = 0; i < done; i += extent)
      ensure(move_range(to + i, from + i, extent, mremap_call),
             "pages that were moved cannot be moved back: {}", errno_text(errno));
    make_absent(to, done);
  }
  // Some failures leave the target unmapped. If it is still mapped, this call fails and changes nothing.
  (void)::mmap(to, bytes, PROT_NONE, kReserved | MAP_FIXED_NOREPLACE, -1, 0);
  fail_to_move(bytes, error);
}

void move_pages(std::byte* from, std::byte* to, std::size_t bytes, std::size_t extent) {
  move_pages(from, to, bytes, extent, ::mremap);
}

}  // namespace sluice::allocator
