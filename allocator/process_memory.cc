#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
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

struct Mapping {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::size_t huge = 0;
};

// How many bytes of the mapping's huge pages lie in the range. Where it overlaps a part of the mapping, the
// huge pages are taken to be spread evenly.
double huge_within(const Mapping& mapping, std::uintptr_t begin, std::uintptr_t end) {
  if (mapping.end <= begin || mapping.begin >= end) return 0;
  const auto overlap = static_cast<double>(std::min(end, mapping.end) - std::max(begin, mapping.begin));
  return overlap * static_cast<double>(mapping.huge) / static_cast<double>(mapping.end - mapping.begin);
}

}  // namespace

std::size_t resident_bytes() { return status_bytes("VmRSS:"); }
std::size_t peak_resident_bytes() { return status_bytes("VmHWM:"); }
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
