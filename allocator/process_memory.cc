#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <string>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/system.h"
#include "core/text_file.h"

namespace sluice::allocator {
namespace {

std::size_t status_bytes(const char* field) {
  const std::string status = read_text_file("/proc/self/status");
  const std::size_t at = status.find(field);
  unsigned long long kib = 0;
  if (at == std::string::npos ||
      std::sscanf(status.c_str() + at + std::string_view(field).size(), "%llu", &kib) != 1)
    fail(ErrorCode::kIo, "/proc/self/status has no line '{}'", field);
  return kib * kKiB;
}

// Returns VmRSS, from a file that is faster to read.
std::size_t present_bytes() {
  const std::string statm = read_text_file("/proc/self/statm");
  unsigned long long all = 0, present = 0;
  if (std::sscanf(statm.c_str(), "%llu %llu", &all, &present) != 2)
    fail(ErrorCode::kIo, "/proc/self/statm has no second number");
  return present * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

struct Mapping {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::size_t huge = 0;
};

// Returns how many bytes of the mapping's huge pages lie in the range. Where the range covers a part of the
// mapping, huge pages are assumed to be spread evenly.
double huge_within(const Mapping& mapping, std::uintptr_t begin, std::uintptr_t end) {
  if (mapping.end <= begin || mapping.begin >= end) return 0;
  const auto overlap = static_cast<double>(std::min(end, mapping.end) - std::max(begin, mapping.begin));
  return overlap * static_cast<double>(mapping.huge) / static_cast<double>(mapping.end - mapping.begin);
}

std::size_t less(std::size_t all, std::size_t others) { return all - std::min(all, others); }

// The memory of other ranks that this process has mapped.
struct Others {
  std::mutex mutex;
  std::size_t now = 0, most = 0;
  std::size_t peak = 0;  // of this process's own memory, when others' memory was mapped
  std::size_t resident() const { return less(present_bytes(), now); }
  std::size_t find_peak() const { return std::max({peak, resident(), less(status_bytes("VmHWM:"), most)}); }
};
Others& others() {
  static Others of_process;
  return of_process;
}

}  // namespace

OthersMemory::OthersMemory(int file, std::size_t bytes, bool writable) {
  Others& all = others();
  {
    const std::lock_guard lock(all.mutex);
    all.peak = all.find_peak();
  }
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const data = ::mmap(nullptr, bytes, access, MAP_SHARED | MAP_POPULATE, file, 0);
  if (data == MAP_FAILED)
    fail(ErrorCode::kIo, "cannot map {} of another rank's memory: {}", format_size(bytes), errno_text(errno));
  data_ = {static_cast<std::byte*>(data), {bytes}};
  ::madvise(data, bytes, MADV_DONTDUMP);
  ::madvise(data, bytes, MADV_DONTFORK);
  const std::lock_guard lock(all.mutex);
  all.now += bytes;
  all.most = std::max(all.most, all.now);
}

void OthersMemory::Unmap::operator()(std::byte* data) const {
  ::munmap(data, bytes);
  Others& all = others();
  const std::lock_guard lock(all.mutex);
  all.now -= bytes;
}

std::size_t resident_bytes() {
  const std::lock_guard lock(others().mutex);
  return others().resident();
}
std::size_t peak_resident_bytes() {
  const std::lock_guard lock(others().mutex);
  return others().find_peak();
}
std::size_t available_memory_bytes() { return memory_state().available; }

bool huge_pages_given(const std::byte* data, std::size_t bytes, double* share) {
  std::ifstream file("/proc/self/smaps");
  if (!file || bytes == 0) return false;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  double huge = 0;
  bool found = false;
  Mapping mapping;
  for (std::string line; std::getline(file, line);) {
    unsigned long long first = 0, last = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &last) == 2) {
      mapping = {first, last, 0};
    } else if (std::sscanf(line.c_str(), "AnonHugePages: %llu kB", &kib) == 1) {
      mapping.huge = kib * kKiB;
      huge += huge_within(mapping, begin, begin + bytes);
      found = true;
    }
  }
  if (found) *share = huge / static_cast<double>(bytes);
  return found;
}

}  // namespace sluice::allocator
