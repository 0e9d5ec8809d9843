#include "engine/memory/device_disk.h"

#include "core/bytes.h"
#include "cuda/gpu.h"
#include "offload/test_files.h"

// Units are on disk, and a GPU computes with them.
namespace sluice::engine::device_disk_test {

using DeviceDiskTest = GpuTest;
constexpr std::size_t kBytes = kHugePage;

// A record on disk, which passes through pieces of its own size, and memory of the GPU's that it fills.
struct OnDisk {
  OnDisk() {
    disk.set_piece(kBytes);
    store.allocate();
    disk.allocate();
    work.add({on_gpu, kBytes}, kBytes);
  }
  ~OnDisk() { work.finish(); }
  OnDisk(const OnDisk&) = delete;
  OnDisk& operator=(const OnDisk&) = delete;

  const std::unique_ptr<Device> device = open_device(0);
  allocator::Ledger ledger;
  offload::RecordStore store{offload::alone(offload::make_memory_file("disk")), ledger};
  DeviceWork work{*device};
  DeviceDisk disk{ledger, work, store};
  const std::unique_ptr<Backing> record = disk.make({.name = "record", .bytes = kBytes});
  const MappedMemory memory{*device, 1};
  std::byte* const on_gpu = reinterpret_cast<std::byte*>(memory.address());
};

// The CPU reads into memory from which the GPU still copies: a thread waits for that copy, and the caller
// does not.
TEST_F(DeviceDiskTest, TheCallerDoesNotWaitWhereTheCpuReads) {
  if (fake() != nullptr) fake()->begin({.schedule = Schedule::kLate});
  OnDisk on_disk;
  HostMemory slot(*on_disk.device, kBytes), copied(*on_disk.device, kBytes);
  for (HostMemory* const host : {&slot, &copied}) on_disk.work.add({host->data(), kBytes}, kBytes);
  Backing& for_cpu = *on_disk.record->for_cpu().backing;
  for (const bool is_checked : {true, false}) {
    std::memset(slot.data(), 1, kBytes);
    TransferGroup group;
    for_cpu.store(0, {slot.data(), kBytes}, group.add());
    group.wait();
    std::memset(slot.data(), 2, kBytes);
    on_disk.work.copy_in(on_disk.on_gpu, {slot.data(), kBytes});
    const auto waits = [&] {
      return fake() == nullptr ? 0 : fake()->counts().waits[std::this_thread::get_id()];
    };
    const std::uint64_t before = waits();
    if (is_checked)
      for_cpu.fetch(0, {slot.data(), kBytes}, group.add());
    else
      for_cpu.fetch_unchecked(0, {slot.data(), kBytes}, group.add());
    EXPECT_EQ(waits(), before);
    group.wait();
    EXPECT_EQ(slot.values(), std::vector<std::byte>(kBytes, std::byte{1}));
    on_disk.work.copy_out(copied.data(), {on_disk.on_gpu, kBytes});
    on_disk.work.wait({copied.data(), kBytes}, DeviceWork::Use::kRead);
    EXPECT_EQ(copied.values(), std::vector<std::byte>(kBytes, std::byte{2}));
  }
}

}  // namespace sluice::engine::device_disk_test
