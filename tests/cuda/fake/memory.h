#pragma once
#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace sluice::fake_cuda {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;

// Thrown by what a call does, with what the call returns.
struct Refusal {
  CUresult result;
  std::string misuse;  // empty where the caller could not know
};

// The device's memory: extents, which are files without a name; addresses; which extent is seen where; and
// the host memory that is registered.
class Memory {
 public:
  // shares: whether the CPU may use it at any time.
  Memory(std::size_t bytes, bool shares) : bytes_(bytes), shares_(shares) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // shared: whether the memory may be exported, as a file that other processes can map. device: whose memory
  // it is.
  std::uint64_t create(std::size_t bytes, bool shared, int device);
  void release(std::uint64_t handle);
  int export_file(std::uint64_t handle) const;
  std::uint64_t import_file(int file);
  CUdeviceptr reserve(std::size_t bytes);
  void free(CUdeviceptr address, std::size_t bytes);
  void map(CUdeviceptr address, std::size_t bytes, std::uint64_t handle);
  void unmap(CUdeviceptr address, std::size_t bytes);
  void allow(CUdeviceptr address, std::size_t bytes);
  // Whether another rank has made the memory that is mapped there.
  bool is_imported(CUdeviceptr address) const {
    const Mapping* const mapping = find_mapping(address);
    return mapping != nullptr && mapping->extent->taken == nullptr;
  }
  // Returns the device whose memory is mapped at the address.
  int device_at(CUdeviceptr address) const { return find_mapping(address)->extent->device; }
  void register_host(void* memory, std::size_t bytes);
  void unregister_host(void* memory);

  // Where the fake itself sees bytes of the device, which must be mapped, one extent after another.
  // Calls use(its address, its size) for each piece.
  template <class Use>
  void pieces(CUdeviceptr address, std::size_t bytes, Use use) {
    if (shares_ && !is_reserved(address)) return use(reinterpret_cast<std::byte*>(address), bytes);
    while (bytes > 0) {
      const Mapping& mapping = mapping_of(address);
      const std::size_t offset = address - mapping.address;
      const std::size_t now = std::min(bytes, mapping.extent->bytes - offset);
      use(mapping.extent->seen + offset, now);
      address += now;
      bytes -= now;
    }
  }
  void expect_mapped(CUdeviceptr address, std::size_t bytes) {
    pieces(address, bytes, [](std::byte*, std::size_t) {});
  }
  // The reserved addresses, by their beginning and size, of which this is one.
  std::optional<std::pair<CUdeviceptr, std::size_t>> reservation_of(CUdeviceptr address) const;
  // While one lives, the CPU sees the device's memory under the device's addresses.
  class Open {
   public:
    explicit Open(Memory& memory) : memory_(memory) { memory_.protect(true); }
    ~Open() { memory_.protect(false); }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    Memory& memory_;
  };
  // The host memory must be registered, and present.
  void expect_registered(const void* memory, std::size_t bytes) const;

  std::size_t taken() const { return taken_; }  // by what this process has made
  std::size_t free_bytes() const { return bytes_ - std::min(bytes_, taken_ + besides_); }
  void take_besides(std::size_t bytes) { besides_ = bytes; }  // by other means than extents
  std::size_t extents() const { return handles_.size(); }
  std::size_t reservations() const { return reservations_.size(); }
  std::size_t mappings() const { return mappings_.size(); }
  std::size_t registrations() const { return registered_.size(); }

 private:
  struct Extent {
    Extent(std::size_t bytes, std::size_t& taken, bool shared, int device);
    explicit Extent(int file);  // imported
    ~Extent();
    Extent(const Extent&) = delete;
    Extent& operator=(const Extent&) = delete;
    void see();
    std::size_t bytes = 0;
    std::size_t* taken = nullptr;  // null: another process has taken it, or this one before
    bool shared = false;
    int device = 0;
    int file = -1;
    std::byte* seen = nullptr;
  };
  struct Mapping {
    CUdeviceptr address;
    std::shared_ptr<Extent> extent;
    bool is_allowed;
  };
  const Mapping* find_mapping(CUdeviceptr address) const;
  const Mapping& mapping_of(CUdeviceptr address) const;  // to which access was given
  void protect(bool is_open) const;
  bool is_reserved(CUdeviceptr address) const { return reservation_of(address).has_value(); }
  bool is_free(CUdeviceptr address, std::size_t bytes) const;

  std::size_t bytes_, taken_ = 0, besides_ = 0;
  const bool shares_;
  std::uint64_t next_handle_ = 1;
  std::map<std::uint64_t, std::shared_ptr<Extent>> handles_;
  std::map<CUdeviceptr, std::size_t> reservations_;
  std::map<CUdeviceptr, Mapping> mappings_;
  std::map<std::uintptr_t, std::size_t> registered_;
};

}  // namespace sluice::fake_cuda
