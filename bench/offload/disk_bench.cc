// Sequential bandwidth of RecordStore, checksums included, beside fio on the same folder in the same run:
//   disk_bench FOLDER [SIZE] [--json]
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <vector>

#include "allocator/ledger.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "core/random.h"
#include "offload/records.h"

namespace sluice::offload {
namespace {

constexpr std::size_t kDepth = 32;       // blocks under way, as fio's iodepth
constexpr std::size_t kPart = 8 * kMiB;  // one call of the store
constexpr std::size_t kParts = 2 * kDepth * RecordStore::kBlock / kPart;  // so that the queue never runs empty
constexpr int kRounds = 3;

class HugeBuffer {
 public:
  explicit HugeBuffer(std::size_t bytes) : reserved_(bytes + kHugePage) {
    memory_ = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED)
      fail(ErrorCode::kBudget, "{} of memory for the buffer cannot be had", format_size(bytes));
    const auto address = round_up(reinterpret_cast<std::uintptr_t>(memory_), kHugePage);
    bytes_ = {reinterpret_cast<std::byte*>(address), bytes};
    ::madvise(bytes_.data(), bytes, MADV_HUGEPAGE);
    const CounterRandom random(1, 0);
    for (std::size_t i = 0; i < bytes; i += 16)
      std::memcpy(bytes_.data() + i, random.block(i / 16).data(), 16);
  }
  ~HugeBuffer() { ::munmap(memory_, reserved_); }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  std::span<std::byte> part(std::size_t index) const { return bytes_.subspan(index * kPart, kPart); }

 private:
  std::size_t reserved_;
  void* memory_;
  std::span<std::byte> bytes_;
};

struct Rates {
  double write = 0, read = 0;  // bytes per second
};

using PartTransfer = std::function<void(std::uint64_t offset, std::span<std::byte> part, Done done)>;

// Keeps kParts calls under way: the buffer's parts are used in turn.
double rate_of(const HugeBuffer& buffer, std::uint64_t bytes, const PartTransfer& transfer) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Batch> under_way(kParts);
  for (std::uint64_t offset = 0; offset < bytes; offset += kPart) {
    const std::size_t index = offset / kPart % kParts;
    under_way[index].wait();
    transfer(offset, buffer.part(index), under_way[index].add());
  }
  for (Batch& batch : under_way) batch.wait();
  return static_cast<double>(bytes) /
         std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Rates store_rates(RecordStore& store, RecordId record, const HugeBuffer& buffer, std::uint64_t bytes) {
  Rates rates;
  rates.write = rate_of(buffer, bytes, [&](auto offset, auto part, Done done) {
    store.write(record, offset, part, std::move(done));
  });
  rates.read = rate_of(buffer, bytes, [&](auto offset, auto part, Done done) {
    store.read(record, offset, part, std::move(done));
  });
  return rates;
}

std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char piece[4096];
  while (const std::size_t count = std::fread(piece, 1, sizeof piece, pipe)) text.append(piece, count);
  return ::pclose(pipe) == 0 ? text : std::string();
}

// fio's memory: huge pages where the machine has reserved some, else transparent ones through malloc's
// tunable.
double fio_rate(const std::string& file, std::uint64_t bytes, const std::string& direction) {
  const std::string text =
      output_of(fmt::format("GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=sluice --output-format=json "
                            "--ioengine=io_uring --direct=1 "
                            "--bs=1M --iodepth={} --mem=malloc --iomem_align=2M --size={} --fallocate=posix "
                            "--rw={} --filename='{}' 2>/dev/null",
                            kDepth, bytes, direction, file));
  const std::size_t start = text.find('{');
  if (start == std::string::npos) return 0;
  return parse_json(std::string_view(text).substr(start), "fio")
      .at("jobs")
      .at(0)
      .at(direction)
      .at("bw_bytes");
}

Rates fio_rates(const std::string& file, std::uint64_t bytes) {
  Rates rates;
  rates.write = fio_rate(file, bytes, "write");
  if (rates.write > 0) rates.read = fio_rate(file, bytes, "read");
  return rates;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

Rates median(const std::vector<Rates>& all) {
  std::vector<double> writes, reads;
  for (const Rates& rates : all) {
    writes.push_back(rates.write);
    reads.push_back(rates.read);
  }
  return {median(writes), median(reads)};
}

Json as_json(const Rates& rates) {
  return {{"write_bytes_per_second", rates.write}, {"read_bytes_per_second", rates.read}};
}

void print(const Rates& ours, const Rates& fio, const std::string& service, bool json) {
  if (json) {
    Json result = {{"service", service}, {"sluice", as_json(ours)}};
    if (fio.read > 0) {
      result["fio"] = as_json(fio);
      result["ratio"] = {{"write", ours.write / fio.write}, {"read", ours.read / fio.read}};
    }
    std::puts(result.dump().c_str());
    return;
  }
  std::printf("%-24s write %6.2f GB/s  read %6.2f GB/s\n", ("sluice, " + service).c_str(), ours.write / 1e9,
              ours.read / 1e9);
  if (fio.read == 0) {
    std::puts("fio is not installed or failed: nothing to compare with");
    return;
  }
  std::printf("%-24s write %6.2f GB/s  read %6.2f GB/s\n", "fio, io_uring", fio.write / 1e9, fio.read / 1e9);
  std::printf("%-24s write %6.2f       read %6.2f\n", "ratio", ours.write / fio.write, ours.read / fio.read);
}

void run(const std::string& folder, std::uint64_t bytes, bool json) {
  allocator::Ledger ledger;
  const std::unique_ptr<IoService> service = make_io_service({.queue_depth = kDepth});
  RecordStore store(*service, {{folder, bytes}}, ledger);
  const RecordId record = store.define("bench", bytes, allocator::Purpose::kOptimizerState);
  store.allocate();
  const HugeBuffer buffer(kParts * kPart);
  const std::string fio_file = fmt::format("{}/sluice-fio-{}", folder, ::getpid());
  store_rates(store, record, buffer, bytes);  // first writes into reserved space are slower, for both
  fio_rates(fio_file, bytes);
  std::vector<Rates> ours, fio;
  for (int round = 0; round < kRounds; ++round) {
    ours.push_back(store_rates(store, record, buffer, bytes));
    fio.push_back(fio_rates(fio_file, bytes));
  }
  std::filesystem::remove(fio_file);
  print(median(ours), median(fio), service->name(), json);
}

}  // namespace
}  // namespace sluice::offload

int main(int count, char** arguments) {
  std::vector<std::string> words(arguments + 1, arguments + count);
  const bool json = std::erase(words, "--json") > 0;
  if (words.empty() || words.size() > 2) {
    std::fprintf(stderr, "usage: %s FOLDER [SIZE] [--json]\n", arguments[0]);
    return 2;
  }
  try {
    const std::uint64_t size = words.size() > 1 ? sluice::parse_size(words[1]) : sluice::kGiB;
    sluice::offload::run(words[0], sluice::round_up(size, sluice::offload::kPart), json);
  } catch (const sluice::Error& error) {
    std::fprintf(stderr, "disk_bench: %s\n", error.what());
    return sluice::exit_status(error.code());
  }
  return 0;
}
