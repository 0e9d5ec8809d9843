#include "cuda/fake/memory.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace sluice::fake_cuda {
namespace {

constexpr std::string_view kName = "device memory ";  // and the device's number

[[noreturn]] void refuse(CUresult result, std::string misuse) { throw Refusal{result, std::move(misuse)}; }

void expect_whole(const char* what, std::uint64_t value) {
  if (value == 0 || value % kGranularity != 0)
    refuse(CUDA_ERROR_INVALID_VALUE,
           fmt::format("{} ({:#x}) is no multiple of {} bytes", what, value, kGranularity));
}

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Leaves the addresses reserved, with nothing under them.
void empty(CUdeviceptr address, std::size_t bytes) {
  ::mmap(at(address), bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Files of extents that are gone, which later ones take: the system clears each page of a new file.
class Spares {
 public:
  bool take(std::size_t bytes, int& file, std::byte*& seen) {
    if (process_ != ::getpid()) all_.clear(), kept_ = 0, process_ = ::getpid();  // those are its parent's
    const auto found = all_.find(bytes);
    if (found == all_.end()) return false;
    std::tie(file, seen) = found->second;
    all_.erase(found);
    kept_ -= bytes;
    return true;
  }
  bool keep(std::size_t bytes, int file, std::byte* seen) {
    if (process_ != ::getpid() || kept_ + bytes > kMost) return false;
    all_.emplace(bytes, std::pair(file, seen));
    kept_ += bytes;
    return true;
  }

 private:
  static constexpr std::size_t kMost = std::size_t{256} << 20;
  std::multimap<std::size_t, std::pair<int, std::byte*>> all_;
  std::size_t kept_ = 0;
  int process_ = 0;
};
Spares& spares() {
  static auto* const all = new Spares();
  return *all;
}

// A thread reaches the device's memory only while it runs a kernel. Where the CPU has no keys of protection
// this is -1, and mprotect() opens and closes all mappings for every thread.
int key() {
  static const int made = ::pkey_alloc(0, PKEY_DISABLE_ACCESS);
  return made;
}

}  // namespace

Memory::Extent::Extent(std::size_t size, std::size_t& all, bool is_shared, int of)
    : bytes(size), taken(&all), shared(is_shared), device(of) {
  if (!shared && spares().take(bytes, file, seen)) {
  } else if (file = ::memfd_create(fmt::format("{}{}", kName, device).c_str(), MFD_CLOEXEC);
             file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    see();
  } else {
    refuse(CUDA_ERROR_SYSTEM_NOT_READY, {});
  }
  std::memset(seen, 0xFF, bytes);
  *taken += bytes;
}
Memory::Extent::Extent(int exported) {
  char name[64] = {};
  const std::string link = fmt::format("/proc/self/fd/{}", exported);
  struct stat found {};
  const bool has_name = ::readlink(link.c_str(), name, sizeof name - 1) >= 0;
  const char* const begin = has_name ? std::strstr(name, kName.data()) : nullptr;
  if (begin == nullptr || ::fstat(exported, &found) != 0)
    refuse(CUDA_ERROR_INVALID_VALUE, "a descriptor is imported that is no extent's");
  device = std::atoi(begin + kName.size());
  bytes = static_cast<std::size_t>(found.st_size);
  file = ::fcntl(exported, F_DUPFD_CLOEXEC, 0);
  see();
}
Memory::Extent::~Extent() {
  if (taken != nullptr) *taken -= bytes;
  if (taken != nullptr && !shared && spares().keep(bytes, file, seen)) return;
  ::munmap(seen, bytes);
  ::close(file);
}
void Memory::Extent::see() {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) refuse(CUDA_ERROR_SYSTEM_NOT_READY, {});
  seen = static_cast<std::byte*>(memory);
}

Memory::~Memory() {
  for (const auto& [address, bytes] : reservations_) ::munmap(at(address), bytes);
}

std::uint64_t Memory::create(std::size_t bytes, bool shared, int device) {
  expect_whole("an extent's size", bytes);
  if (bytes > free_bytes()) refuse(CUDA_ERROR_OUT_OF_MEMORY, {});
  handles_.emplace(next_handle_, std::make_shared<Extent>(bytes, taken_, shared, device));
  return next_handle_++;
}
void Memory::release(std::uint64_t handle) {
  if (handles_.erase(handle) == 0)
    refuse(CUDA_ERROR_INVALID_VALUE, "an extent is released that there is not");
}

int Memory::export_file(std::uint64_t handle) const {
  const auto extent = handles_.find(handle);
  if (extent == handles_.end() || !extent->second->shared)
    refuse(CUDA_ERROR_INVALID_VALUE, "an extent is exported that is not shared");
  return ::fcntl(extent->second->file, F_DUPFD_CLOEXEC, 0);
}
std::uint64_t Memory::import_file(int file) {
  handles_.emplace(next_handle_, std::make_shared<Extent>(file));
  return next_handle_++;
}

CUdeviceptr Memory::reserve(std::size_t bytes) {
  expect_whole("the size of a reservation", bytes);
  void* const memory =
      ::mmap(nullptr, bytes + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) refuse(CUDA_ERROR_OUT_OF_MEMORY, {});
  const auto begin = reinterpret_cast<CUdeviceptr>(memory);
  const CUdeviceptr address = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (address > begin) ::munmap(memory, address - begin);
  ::munmap(at(address + bytes), begin + kGranularity - address);
  reservations_.emplace(address, bytes);
  return address;
}
void Memory::free(CUdeviceptr address, std::size_t bytes) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != bytes)
    refuse(CUDA_ERROR_INVALID_VALUE, fmt::format("{:#x} is no reservation of {} bytes", address, bytes));
  if (!is_free(address, bytes))
    refuse(CUDA_ERROR_INVALID_VALUE,
           fmt::format("the reservation at {:#x} ends, and memory is mapped there", address));
  ::munmap(at(address), bytes);
  reservations_.erase(found);
}

bool Memory::is_free(CUdeviceptr address, std::size_t bytes) const {
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return false;
  if (next == mappings_.begin()) return true;
  const Mapping& before = std::prev(next)->second;
  return before.address + before.extent->bytes <= address;
}

void Memory::map(CUdeviceptr address, std::size_t bytes, std::uint64_t handle) {
  expect_whole("the address of a mapping", address);
  const auto extent = handles_.find(handle);
  if (extent == handles_.end()) refuse(CUDA_ERROR_INVALID_VALUE, "an extent is mapped that there is not");
  if (extent->second->bytes != bytes)
    refuse(CUDA_ERROR_INVALID_VALUE,
           fmt::format("{} bytes of an extent of {} are mapped", bytes, extent->second->bytes));
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin() || std::prev(after)->first + std::prev(after)->second < address + bytes)
    refuse(CUDA_ERROR_INVALID_VALUE, fmt::format("{:#x} is mapped, and was not reserved", address));
  if (!is_free(address, bytes))
    refuse(CUDA_ERROR_INVALID_VALUE, fmt::format("{:#x} is mapped, and was mapped before", address));
  if (::mmap(at(address), bytes, PROT_NONE, MAP_FIXED | MAP_SHARED, extent->second->file, 0) == MAP_FAILED)
    refuse(CUDA_ERROR_SYSTEM_NOT_READY, {});
  mappings_.emplace(address, Mapping{address, extent->second, false});
}
void Memory::unmap(CUdeviceptr address, std::size_t bytes) {
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.extent->bytes != bytes)
    refuse(CUDA_ERROR_INVALID_VALUE,
           fmt::format("{} bytes at {:#x} are unmapped, and are no mapping", bytes, address));
  empty(address, bytes);
  mappings_.erase(found);
}
void Memory::allow(CUdeviceptr address, std::size_t bytes) {
  for (CUdeviceptr now = address; now < address + bytes;) {
    const auto found = mappings_.find(now);
    if (found == mappings_.end())
      refuse(CUDA_ERROR_INVALID_VALUE, fmt::format("access is given to {:#x}, where nothing is mapped", now));
    found->second.is_allowed = true;
    if (shares_)
      ::mprotect(at(now), found->second.extent->bytes, PROT_READ | PROT_WRITE);
    else if (key() >= 0)
      ::pkey_mprotect(at(now), found->second.extent->bytes, PROT_READ | PROT_WRITE, key());
    now += found->second.extent->bytes;
  }
}

std::optional<std::pair<CUdeviceptr, std::size_t>> Memory::reservation_of(CUdeviceptr address) const {
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin() || address - std::prev(after)->first >= std::prev(after)->second)
    return std::nullopt;
  return *std::prev(after);
}

void Memory::protect(bool is_open) const {
  if (shares_) return;
  if (key() >= 0) {
    ::pkey_set(key(), is_open ? 0 : PKEY_DISABLE_ACCESS);
    return;
  }
  for (const auto& [address, mapping] : mappings_)
    if (mapping.is_allowed)
      ::mprotect(at(address), mapping.extent->bytes, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

const Memory::Mapping* Memory::find_mapping(CUdeviceptr address) const {
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return nullptr;
  const Mapping& before = std::prev(after)->second;
  return before.address + before.extent->bytes <= address ? nullptr : &before;
}
const Memory::Mapping& Memory::mapping_of(CUdeviceptr address) const {
  const Mapping* const mapping = find_mapping(address);
  if (mapping == nullptr)
    refuse(CUDA_ERROR_ILLEGAL_ADDRESS, fmt::format("{:#x} is used, and nothing is mapped there", address));
  if (!mapping->is_allowed)
    refuse(CUDA_ERROR_ILLEGAL_ADDRESS, fmt::format("{:#x} is used, to which no access was given", address));
  return *mapping;
}

void Memory::register_host(void* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const auto next = registered_.lower_bound(begin);
  const bool meets_next = next != registered_.end() && next->first < begin + bytes;
  const bool meets_before =
      next != registered_.begin() && std::prev(next)->first + std::prev(next)->second > begin;
  if (meets_next || meets_before)
    refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "host memory is registered twice");
  if (bytes == 0) refuse(CUDA_ERROR_INVALID_VALUE, "host memory of no bytes is registered");
  registered_.emplace(begin, bytes);
  const std::uintptr_t page = begin / 4096 * 4096;
  (void)::madvise(reinterpret_cast<void*>(page), begin + bytes - page, MADV_POPULATE_WRITE);
  try {
    expect_registered(memory, bytes);
  } catch (const Refusal&) {
    registered_.erase(begin);
    refuse(CUDA_ERROR_INVALID_VALUE, "host memory is registered that is not there");
  }
}
void Memory::unregister_host(void* memory) {
  const auto found = registered_.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == registered_.end())
    refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "host memory is unregistered that was not registered");
  const std::size_t bytes = found->second;
  try {
    expect_registered(memory, bytes);
  } catch (const Refusal&) {
    registered_.erase(found);
    throw;
  }
  registered_.erase(found);
}

void Memory::expect_registered(const void* memory, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const auto after = registered_.upper_bound(begin);
  if (after == registered_.begin() || std::prev(after)->first + std::prev(after)->second < begin + bytes)
    refuse(CUDA_ERROR_INVALID_VALUE, "a copy is of host memory that is not registered");
  constexpr std::uintptr_t kPage = 4096;
  const std::uintptr_t first = begin / kPage * kPage;
  std::vector<unsigned char> pages((begin + bytes - first + kPage - 1) / kPage);
  const bool is_there =
      ::mincore(reinterpret_cast<void*>(first), begin + bytes - first, pages.data()) == 0 &&
      std::all_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
  if (!is_there)
    refuse(CUDA_ERROR_ILLEGAL_ADDRESS, "host memory is used that was freed or moved while it was registered");
}

}  // namespace sluice::fake_cuda
