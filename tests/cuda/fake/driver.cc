#include "cuda/fake/driver.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "cuda/fake/fibers.h"
#include "kernels/cuda/sum.h"

namespace sluice::fake_cuda {

void FakeDriver::begin(const Settings& settings) {
  const std::lock_guard lock(mutex_);
  settings_ = settings;
  memory_ = std::make_unique<Memory>(settings.memory, settings.shares_memory);
  work_ = std::make_unique<Work>(settings);
  counts_ = {};
  misuses_.clear();
  failures_.clear();
  faults_.clear();
  random_.seed(settings.seed);
  process_ = 0;
  retained_ = 0;
  modules_ = 0;
  made_contexts_.clear();
  nccl_communicators_ = 0;
  account();
}
void FakeDriver::fail(const std::string& function, std::uint64_t n, int result) {
  const std::lock_guard lock(mutex_);
  failures_[function] = {counts_.calls[function] + n, static_cast<CUresult>(result)};
}
void FakeDriver::fail_device(int device, std::uint64_t n, int result) {
  const std::lock_guard lock(mutex_);
  faults_[context_of(device)] = {n, static_cast<CUresult>(result)};
}
int FakeDriver::device_of(CUcontext context) const {
  for (const std::unique_ptr<int>& made : made_contexts_)
    if (reinterpret_cast<CUcontext>(made.get()) == context) return *made;
  return static_cast<int>(reinterpret_cast<std::uint64_t>(context) - kFirstContext);
}
void FakeDriver::refuse_after_a_fault(CUcontext context) {
  const auto found = faults_.find(context);
  if (found == faults_.end()) return;
  auto& [left, result] = found->second;
  if (left == 0 && result != CUDA_SUCCESS) throw Refusal{result, {}};
  left -= left > 0 ? 1 : 0;
}
bool FakeDriver::ends(std::string_view function) {
  constexpr std::array kEnds = {"Destroy", "Release", "Unmap", "AddressFree", "Unregister", "Unload"};
  return std::ranges::any_of(kEnds, [&](std::string_view end) { return function.ends_with(end); });
}
void FakeDriver::leave_out(const LeftOut& what) {
  const std::lock_guard lock(mutex_);
  work_->leave_out(what);
}
void FakeDriver::capture_default(bool begins) {
  const std::lock_guard lock(mutex_);
  try {
    if (begins)
      work_->begin_capture(CU_STREAM_LEGACY, CU_STREAM_CAPTURE_MODE_GLOBAL);
    else
      work_->end_capture(CU_STREAM_LEGACY);
  } catch (const Refusal& refusal) {
    misuses_.push_back(refusal.misuse.empty() ? "a capture was ended by what is not part of it"
                                              : refusal.misuse);
  }
}
std::uint64_t FakeDriver::left_out() {
  const std::lock_guard lock(mutex_);
  return work_->left_out();
}
std::vector<std::string> FakeDriver::take_misuses() {
  const std::lock_guard lock(mutex_);
  return std::exchange(misuses_, {});
}
std::vector<std::string> FakeDriver::alive() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  const auto add = [&](std::size_t count, const char* what) {
    if (count > 0) texts.push_back(fmt::format("{} {}", count, what));
  };
  add(memory_->extents(), "extents");
  add(memory_->reservations(), "reservations");
  add(memory_->mappings(), "mappings");
  add(memory_->registrations(), "registrations");
  add(work_->streams(), "streams");
  add(work_->events(), "events");
  add(modules_, "modules");
  add(retained_, "uses of the context");
  add(made_contexts_.size(), "contexts");
  add(static_cast<std::size_t>(nccl_communicators_), "communicators of NCCL");
  return texts;
}
Counts FakeDriver::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}
bool FakeDriver::shares_memory() {
  const std::lock_guard lock(mutex_);
  return settings_.shares_memory;
}
std::uint64_t FakeDriver::memory_taken() {
  const std::lock_guard lock(mutex_);
  return memory_->taken();
}

// Does the work when its turn comes. Where it was queued in order, and memory has gone since, the device has
// a fault.
void FakeDriver::copy(CUstream stream, CUdeviceptr device, std::byte* host, std::size_t bytes, bool is_in) {
  if (is_in)
    memory_->expect_mapped(device, bytes);
  else
    memory_->expect_mapped(device, bytes);
  memory_->expect_registered(host, bytes);
  const auto begin = reinterpret_cast<std::uint64_t>(host);
  work_->queue(stream, {{device, device + bytes, false}, {begin, begin + bytes, true}},
               [this, device, host, bytes, is_in] {
                 memory_->expect_registered(host, bytes);
                 std::byte* now = host;
                 memory_->pieces(device, bytes, [&](std::byte* seen, std::size_t size) {
                   if (is_in)
                     std::memcpy(seen, now, size);
                   else
                     std::memcpy(now, seen, size);
                   now += size;
                 });
               });
  (is_in ? counts_.bytes_in : counts_.bytes_out) += bytes;
}
void FakeDriver::copy_within(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  memory_->expect_mapped(to, bytes);
  memory_->expect_mapped(from, bytes);
  work_->queue(stream, {{to, to + bytes, false}, {from, from + bytes, false}}, [this, to, from, bytes] {
    std::vector<std::span<const std::byte>> parts;  // of what is copied
    memory_->pieces(from, bytes,
                    [&](const std::byte* seen, std::size_t size) { parts.emplace_back(seen, size); });
    auto part = parts.begin();
    memory_->pieces(to, bytes, [&](std::byte* seen, std::size_t size) {
      while (size > 0) {
        const std::size_t now = std::min(size, part->size());
        std::memmove(seen, part->data(), now);
        seen += now, size -= now;
        *part = part->subspan(now);
        if (part->empty()) ++part;
      }
    });
  });
  counts_.bytes_within += bytes;
  if (memory_->is_imported(from)) own_counts().bytes_copied += bytes;
}
void FakeDriver::fill(CUstream stream, CUdeviceptr to, unsigned char value, std::size_t bytes) {
  memory_->expect_mapped(to, bytes);
  work_->queue(stream, {{to, to + bytes, false}}, [this, to, value, bytes] {
    memory_->pieces(to, bytes, [&](std::byte* seen, std::size_t size) { std::memset(seen, value, size); });
  });
}
void FakeDriver::run_on_host(CUstream stream, CUhostFn function, void* argument) {
  work_->queue(stream, {}, [function, argument] {
    std::thread([&] {
      is_in_host_function_ = true;
      function(argument);
    }).join();
  });
}
void FakeDriver::launch(CUstream stream, CUfunction function, unsigned blocks, unsigned threads,
                        void** arguments) {
  const Kernel& kernel = *reinterpret_cast<const Kernel*>(function);
  if (blocks == 0 || threads == 0 || threads > 1024)
    throw Refusal{CUDA_ERROR_INVALID_VALUE,
                  fmt::format("a kernel is given {} blocks of {} threads", blocks, threads)};
  const auto* const first = static_cast<const std::byte*>(arguments[0]);
  std::vector<std::byte> copy(first, first + kernel.argument_bytes);
  own_counts().bytes_added += read_of_others(kernel, copy.data());
  // How much of the memory behind its arguments a kernel uses is not known, so none of it may go.
  std::vector<Range> ranges;
  for (std::size_t at = 0; at + sizeof(CUdeviceptr) <= copy.size(); at += sizeof(CUdeviceptr)) {
    CUdeviceptr word = 0;
    std::memcpy(&word, copy.data() + at, sizeof word);
    if (const auto found = memory_->reservation_of(word))
      ranges.push_back({found->first, found->first + found->second, false});
  }
  work_->queue(stream, std::move(ranges), [this, &kernel, blocks, threads, copy = std::move(copy)] {
    const Memory::Open open(*memory_);
    run_kernel(kernel, blocks, threads, copy.data(), random_);
  });
}
// The mean over ranks is the only kernel that may read what others have made.
std::uint64_t FakeDriver::read_of_others(const Kernel& kernel, const void* arguments) const {
  kernels::GpuMean mean;
  if (&kernel == find_kernel("sluice_mean")) std::memcpy(&mean, arguments, sizeof mean);
  std::uint64_t bytes = 0;
  for (std::uint32_t rank = 0; rank < mean.ranks; ++rank)
    if (memory_->is_imported(reinterpret_cast<CUdeviceptr>(mean.of_ranks[rank])))
      bytes += mean.count * (mean.types[rank] == Dtype::kF32 ? 4 : 2);
  return bytes;
}
void FakeDriver::account() {
  const std::size_t all = made_contexts_.size() + (retained_ > 0 ? 1 : 0);
  memory_->take_besides(all * settings_.context_memory + modules_ * settings_.module_memory +
                        static_cast<std::size_t>(nccl_communicators_) * settings_.nccl_memory);
}
void FakeDriver::serve_ranks() {
  const std::lock_guard lock(mutex_);
  try {
    work_->serve_ranks();
  } catch (const Refusal& refusal) {
    misuses_.push_back("a GPU, for other ranks: " + refusal.misuse);
  }
}
void FakeDriver::unmap(CUdeviceptr address, std::size_t bytes) {
  if (work_->uses(address, address + bytes, false))
    throw Refusal{CUDA_ERROR_ILLEGAL_ADDRESS,
                  fmt::format("{:#x} is unmapped, and queued work uses it", address)};
  memory_->unmap(address, bytes);
}
void FakeDriver::unregister_host(void* memory) {
  const auto begin = reinterpret_cast<std::uint64_t>(memory);
  if (work_->uses(begin, begin + 1, true))
    throw Refusal{CUDA_ERROR_INVALID_VALUE, "host memory is unregistered, and queued work uses it"};
  memory_->unregister_host(memory);
}
int FakeDriver::attribute(CUdevice_attribute what) const {
  switch (what) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return settings_.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 4;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 2;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return settings_.has_virtual_memory ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
      return settings_.compute_mode;
    default:
      throw Refusal{CUDA_ERROR_INVALID_VALUE,
                    fmt::format("attribute {} is not known here", static_cast<int>(what))};
  }
}
void FakeDriver::expect_device(CUdevice device) const {
  if (device < 0 || device >= settings_.devices)
    throw Refusal{CUDA_ERROR_INVALID_DEVICE, "there is no such device"};
}
bool FakeDriver::reaches(CUdevice device, CUdeviceptr imported) const {
  return settings_.has_peers && device / settings_.peers == memory_->device_at(imported) / settings_.peers;
}

// It never ends, since a thread of its own uses it (nccl.cc).
FakeDriver& fake() {
  static FakeDriver* const driver = new FakeDriver();
  return *driver;
}

}  // namespace sluice::fake_cuda

sluice::fake_cuda::Control* sluice_fake_cuda() { return &sluice::fake_cuda::fake(); }
