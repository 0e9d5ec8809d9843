#include <sys/mman.h>

#include "cuda/gpu.h"
#include "thrown.h"

// Extents, addresses and mappings.
namespace sluice::memory_test {

class MemoryTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    device_ = open_device(0);
    stream_ = device_->make_stream(false);
    piece_ = device_->info().extent_bytes;
  }
  void TearDown() override {
    stream_.reset();
    device_.reset();
    GpuTest::TearDown();
  }
  void write(DeviceAddress to, HostMemory& host, std::byte value) {
    std::fill_n(host.data(), host.size(), value);
    device_->copy_in(stream_.get(), to, host.data(), host.size());
    device_->synchronize(stream_.get());
  }
  std::vector<std::byte> read(DeviceAddress from, HostMemory& host) {
    std::fill_n(host.data(), host.size(), std::byte{0x77});
    device_->copy_out(stream_.get(), host.data(), from, host.size());
    device_->synchronize(stream_.get());
    return host.values();
  }
  // A driver refuses misuse; the fake also remembers it.
  void expect_refused(const std::string& misuse, const std::function<void()>& call) {
    expect_error(ErrorCode::kIo, {"GPU 0 (" + device_->info().pci_address + "): cu"}, call);
    if (fake() == nullptr) return;
    const auto misuses = fake()->take_misuses();
    ASSERT_EQ(misuses.size(), 1U) << misuse;
    EXPECT_NE(misuses[0].find(misuse), std::string::npos) << misuses[0];
  }

  std::unique_ptr<Device> device_;
  Device::Stream stream_{nullptr, {}};
  std::size_t piece_ = 0;
};

TEST_F(MemoryTest, AnExtentShowsTheSameBytesAtAllItsAddresses) {
  HostMemory host(*device_, piece_);
  MappedMemory memory(*device_, 1);
  const DeviceAddress other = device_->reserve_addresses(piece_);
  device_->map(other, piece_, memory.extent(0));
  write(memory.address(), host, std::byte{5});
  EXPECT_EQ(read(other, host), std::vector<std::byte>(piece_, std::byte{5}));
  write(other, host, std::byte{6});
  EXPECT_EQ(read(memory.address(), host), std::vector<std::byte>(piece_, std::byte{6}));
  device_->unmap(other, piece_);
  device_->free_addresses(other, piece_);
}

TEST_F(MemoryTest, ContentsMoveWithTheExtentToOtherAddresses) {
  HostMemory host(*device_, piece_);
  const DeviceAddress homes = device_->reserve_addresses(2 * piece_);
  const Device::Extent extent = device_->create_extent(piece_);
  device_->map(homes, piece_, extent);
  write(homes, host, std::byte{9});
  device_->unmap(homes, piece_);
  device_->map(homes + piece_, piece_, extent);
  EXPECT_EQ(read(homes + piece_, host), std::vector<std::byte>(piece_, std::byte{9}));
  device_->unmap(homes + piece_, piece_);
  device_->release_extent(extent);
  device_->free_addresses(homes, 2 * piece_);
}

TEST_F(MemoryTest, SeveralExtentsAreMappedAllOrNone) {
  HostMemory host(*device_, piece_);
  MappedMemory memory(*device_, 2);
  const DeviceAddress home = device_->reserve_addresses(2 * piece_);
  const std::vector<Device::Mapping> wrong = {{home, memory.extent(0)}, {home, memory.extent(1)}};
  expect_refused("was mapped before", [&] { device_->map(piece_, wrong); });
  const std::vector<Device::Mapping> both = {{home, memory.extent(1)}, {home + piece_, memory.extent(0)}};
  if (fake() != nullptr) {
    fake()->fail("cuMemSetAccess", 0, 999);
    expect_error(ErrorCode::kIo, {"cuMemSetAccess"}, [&] { device_->map(piece_, both); });
  }
  device_->map(piece_, both);
  write(home, host, std::byte{5});
  write(home + piece_, host, std::byte{6});
  EXPECT_EQ(read(memory.address(), host), std::vector<std::byte>(piece_, std::byte{6}));
  EXPECT_EQ(read(memory.address() + piece_, host), std::vector<std::byte>(piece_, std::byte{5}));
  for (const Device::Mapping& mapping : both) device_->unmap(mapping.address, piece_);
  device_->free_addresses(home, 2 * piece_);
}

TEST_F(MemoryTest, AMappedExtentOutlivesItsHandle) {
  HostMemory host(*device_, piece_);
  const DeviceAddress home = device_->reserve_addresses(piece_);
  const Device::Extent extent = device_->create_extent(piece_);
  device_->map(home, piece_, extent);
  device_->release_extent(extent);
  write(home, host, std::byte{3});
  EXPECT_EQ(read(home, host), std::vector<std::byte>(piece_, std::byte{3}));
  const std::size_t free = device_->free_memory();
  device_->unmap(home, piece_);
  EXPECT_GE(device_->free_memory(), free + piece_);
  device_->free_addresses(home, piece_);
}

TEST_F(MemoryTest, CopiesPassTheBordersOfExtents) {
  HostMemory host(*device_, piece_);
  MappedMemory memory(*device_, 3);
  for (std::size_t i = 0; i < 3; ++i) write(memory.address() + i * piece_, host, static_cast<std::byte>(i));
  for (std::size_t i = 0; i < piece_; ++i) host[i] = static_cast<std::byte>(i * 31 / 7);
  const std::vector<std::byte> values = host.values();
  device_->copy_in(stream_.get(), memory.address() + piece_ / 2 + 3, host.data(), piece_);
  device_->copy(stream_.get(), memory.address() + 2 * piece_ - 100, memory.address() + piece_ / 2 + 3, 300);
  EXPECT_EQ(read(memory.address() + piece_ / 2 + 3, host), values);
  const std::vector<std::byte> end = read(memory.address() + 2 * piece_ - 100, host);
  EXPECT_TRUE(std::equal(end.begin(), end.begin() + 300, values.begin()));
}

TEST_F(MemoryTest, MisuseIsRefused) {
  MappedMemory memory(*device_, 2);
  const Device::Extent extent = device_->create_extent(piece_);
  expect_refused("was mapped before", [&] { device_->map(memory.address(), piece_, extent); });
  expect_refused("was not reserved", [&] { device_->map(memory.address() + 2 * piece_, piece_, extent); });
  expect_refused("no multiple", [&] { device_->map(memory.address() + 4096, piece_, extent); });
  expect_refused("no multiple", [&] { device_->create_extent(piece_ + 4096); });
  expect_refused("are no mapping", [&] { device_->unmap(memory.address(), piece_ / 2); });
  if (fake() != nullptr)  // CUDA's documents do not say what a driver does
    expect_refused("memory is mapped there",
                   [&] { device_->free_addresses(memory.address(), memory.bytes()); });
  device_->release_extent(extent);
}

TEST_F(MemoryTest, HostMemoryIsRegisteredOnce) {
  HostMemory host(*device_, 1 << 20);
  expect_refused("registered twice", [&] { device_->register_host(host.data(), host.size()); });
  std::vector<std::byte> other(4096);
  expect_refused("was not registered", [&] { device_->unregister_host(other.data()); });
}

TEST_F(MemoryTest, NewMemoryIsNotANumber) {
  SLUICE_NEEDS_THE_FAKE();
  HostMemory host(*device_, 4);
  MappedMemory memory(*device_, 1);
  read(memory.address(), host);
  float value = 0;
  std::memcpy(&value, host.data(), sizeof value);
  EXPECT_TRUE(std::isnan(value));
}

TEST_F(MemoryTest, TheCpuCannotTouchIt) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  MappedMemory memory(*device_, 1);
  EXPECT_DEATH(*reinterpret_cast<volatile char*>(memory.address()) = 1, "");
}

TEST_F(MemoryTest, MisuseThatAGpuMayNotNoticeIsFound) {
  SLUICE_NEEDS_THE_FAKE();
  MappedMemory memory(*device_, 1);
  std::vector<std::byte> pageable(4096);
  expect_refused("not registered",
                 [&] { device_->copy_in(stream_.get(), memory.address(), pageable.data(), 4096); });
  {
    HostMemory host(*device_, 2 * piece_);
    expect_refused("nothing is mapped",
                   [&] { device_->copy_in(stream_.get(), memory.address() + 4096, host.data(), piece_); });
  }
  const auto free_moved = [&](const char* misuse, const std::function<void(void*)>& go) {
    void* const pages = ::mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    device_->register_host(static_cast<std::byte*>(pages), 1 << 16);
    go(pages);
    expect_refused(misuse, [&] { device_->unregister_host(static_cast<std::byte*>(pages)); });
  };
  free_moved("freed or moved", [](void* pages) { ::munmap(pages, 1 << 16); });
  free_moved("freed or moved", [](void* pages) { ::madvise(pages, 1 << 16, MADV_DONTNEED); });
}

}  // namespace sluice::memory_test
