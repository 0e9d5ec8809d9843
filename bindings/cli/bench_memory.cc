#include "allocator/memory.h"
#include "bindings/cli/memory_bench.h"
#include "core/bytes.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

// `bench copy` compares memory-bound loops with loops that only move the same bytes.
namespace sluice::cli {
namespace {

using Touch = kernels::MemoryStream::Touch;

}  // namespace

BenchReport bench_copy(const BenchOptions& options, BenchProgress& progress) {
  const std::uint64_t size = options.size == 0 ? 256 * kMiB : options.size;
  const std::size_t elements = round_up(divide_up(size, sizeof(float)), kElementGrain);
  const std::size_t bytes = elements * sizeof(float);
  require_free_memory(2 * bytes, "give a smaller --size");
  BenchReport report;
  report.bench = "copy";
  report.threads = thread_count(options);
  report.settings = {{"bytes", bytes}};
  Threads threads(report.threads);
  allocator::Ledger ledger;
  const allocator::Region memory(ledger, allocator::Purpose::kWorkspace, 2 * bytes);
  std::byte *const from = memory.data(), *const to = from + bytes;
  const Array wide{from, Dtype::kF32}, other{to, Dtype::kF32}, narrow{to, Dtype::kBf16},
      half{to, Dtype::kF16};
  MemoryBench bench(threads, report);
  const auto add = [&](const char* name, MemoryPass pass, const std::function<void()>& call) {
    bench.add({name, {std::move(pass)}, call, {}, {}});
  };
  add("copy of f32", {{from, bytes, Touch::kRead}, {to, bytes, Touch::kWrite}},
      [&threads, elements, wide, other] { kernels::convert(threads, elements, wide, other); });
  add("f32 to bf16", {{from, bytes, Touch::kRead}, {to, bytes / 2, Touch::kWrite}},
      [&threads, elements, wide, narrow] { kernels::convert(threads, elements, wide, narrow); });
  add("bf16 to f32", {{to, bytes / 2, Touch::kRead}, {from, bytes, Touch::kWrite}},
      [&threads, elements, wide, narrow] { kernels::convert(threads, elements, narrow, wide); });
  add("f32 to f16", {{from, bytes, Touch::kRead}, {to, bytes / 2, Touch::kWrite}},
      [&threads, elements, wide, half] { kernels::convert(threads, elements, wide, half); });
  add("f16 to f32", {{to, bytes / 2, Touch::kRead}, {from, bytes, Touch::kWrite}},
      [&threads, elements, wide, half] { kernels::convert(threads, elements, half, wide); });
  add("sum into", {{from, bytes, Touch::kUpdate}, {to, bytes, Touch::kRead}},
      [&threads, elements, wide, other] { kernels::add(threads, elements, wide, other, wide); });
  add("squares", {{from, bytes, Touch::kRead}},
      [&threads, elements, wide] { kernels::sum_of_squares(threads, 0, elements, wide); });
  bench.measure(options.seconds, progress);
  return report;
}

}  // namespace sluice::cli
