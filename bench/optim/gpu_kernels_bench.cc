// Measures the kernels of updates and of sums of gradients on a GPU by the bytes that they read and write in
// a second, beside those of copies within the GPU's memory, which nothing can pass. Each launch uses other
// memory than those before it, so that none of it is in the GPU's caches.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "kernels/device_sum.h"
#include "optim/device_update.h"

namespace sluice::optim {
namespace {

constexpr std::size_t kAligned = 256;
constexpr double kLongEnough = 0.02;  // seconds

struct Options {
  std::vector<std::size_t> elements = {kMiB, 16 * kMiB, 100 * kMiB};
  std::string memory = "8GiB";
  int device = 0;
  bool json = false;
};

// A launch on arrays that begin at a given place in memory.
struct Work {
  std::string name;
  std::size_t elements;
  std::size_t room, bytes;  // that it takes, and that it reads and writes
  std::function<void(std::byte* at)> launch;
};

// Hands out arrays of one place, one after another.
class Arrays {
 public:
  explicit Arrays(std::byte* at) : at_(at) {}
  Array next(std::size_t elements, Dtype type) {
    Array array{at_, type};
    at_ += round_up(elements * size_of(type), kAligned);
    return array;
  }
  std::size_t bytes() const { return reinterpret_cast<std::uintptr_t>(at_); }  // where they began at null

 private:
  std::byte* at_;
};

class Bench {
 public:
  Bench(Device& device, std::size_t memory)
      : device_(device), memory_(ledger_, device, allocator::Purpose::kWorkspace, memory) {
    device.fill(stream_.get(), memory_.address(), std::byte{0x3c},
                memory_.size());  // small numbers in each type
  }
  ~Bench() {
    try {
      device_.synchronize(stream_.get());
    } catch (const Error&) {  // was reported where it was found
    }
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  CUstream_st* stream() const { return stream_.get(); }
  std::size_t memory() const { return memory_.size(); }
  // The median of five measurements, each of as many launches as take long enough.
  double seconds(const Work& work) {
    seconds_of(work, 1);  // warms up
    std::size_t launches = 1;
    while (seconds_of(work, launches) < kLongEnough) launches *= 2;
    std::vector<double> found;
    for (int i = 0; i < 5; ++i) found.push_back(seconds_of(work, launches) / static_cast<double>(launches));
    std::ranges::sort(found);
    return found[found.size() / 2];
  }

 private:
  double seconds_of(const Work& work, std::size_t launches) {
    const std::size_t places = memory_.size() / work.room;
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < launches; ++i)
      work.launch(reinterpret_cast<std::byte*>(memory_.address()) + i % places * work.room);
    device_.synchronize(stream_.get());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  Device& device_;
  Device::Stream stream_ = device_.make_stream(false);
  allocator::Ledger ledger_;
  allocator::DeviceRegion memory_;
};

Work copy_of(Device& device, const Bench& bench, std::size_t bytes) {
  return {"copy", bytes, 2 * bytes, 2 * bytes, [&device, &bench, bytes](std::byte* at) {
            const auto from = reinterpret_cast<DeviceAddress>(at);
            device.copy(bench.stream(), from + bytes, from, bytes);
          }};
}

// Of a bf16 parameter. `spans` are the parts in which it is one launch.
Work update_of(DeviceUpdate& update, const Optimizer& optimizer, const Bench& bench, std::string name,
               std::size_t elements, std::size_t spans) {
  const auto part_of = [&optimizer, elements](Arrays& arrays) {
    DeviceUpdate::Part part;
    part.hyperparameters.learning_rate = 1e-4;
    part.span.count = elements;
    part.span.gradient = arrays.next(elements, Dtype::kBf16);
    part.span.parameter = arrays.next(elements, Dtype::kBf16);
    if (optimizer.keeps_master()) part.span.master = arrays.next(elements, Dtype::kF32).f32();
    for (const StateArray& array : optimizer.state())
      part.span.state.push_back({arrays.next(elements, array.type)});
    return part;
  };
  Arrays room(nullptr);
  const Span span = part_of(room).span;
  std::size_t bytes = 3 * size_of(Dtype::kBf16);  // of an element: the gradient, and the parameter
  if (optimizer.keeps_master()) bytes += 2 * sizeof(float) - size_of(Dtype::kBf16);  // it is not read then
  for (const StatePart& part : span.state) bytes += 2 * size_of(part.values.type);
  return {std::move(name), elements, room.bytes(), elements * bytes,
          [&update, &bench, elements, spans, part_of](std::byte* at) {
            Arrays arrays(at);
            const DeviceUpdate::Part whole = part_of(arrays);
            std::vector<DeviceUpdate::Part> parts(spans, whole);
            const std::size_t each = round_up(divide_up(elements, spans), kScaleBlock);
            for (std::size_t i = 0; i < spans; ++i) {
              Span& part = parts[i].span;
              const std::size_t first = std::min(i * each, elements);
              part.count = std::min(each, elements - first);
              part.first_index = first;
              part.gradient = part.gradient.at(first);
              part.parameter = part.parameter.at(first);
              if (part.master != nullptr) part.master += first;
              for (StatePart& state : part.state) state.values = state.values.at(first);
            }
            update.apply(bench.stream(), parts);
          }};
}

Work sum_of(kernels::DeviceSum& sum, const Bench& bench, std::string name, std::size_t elements, bool adds) {
  struct Places {
    Array from, to, squares;
  };
  const auto places_of = [elements](Arrays& arrays) {
    Places places;
    places.from = arrays.next(elements, Dtype::kBf16);
    places.to = arrays.next(elements, Dtype::kF32);
    places.squares = arrays.next(2 * divide_up(elements, kernels::kGridBlock), Dtype::kF32);
    return places;
  };
  Arrays room(nullptr);
  places_of(room);
  const std::size_t bytes = size_of(Dtype::kBf16) + (adds ? 2 : 1) * sizeof(float);
  return {std::move(name), elements, room.bytes(), elements * bytes,
          [&sum, &bench, elements, adds, places_of](std::byte* at) {
            Arrays arrays(at);
            const Places places = places_of(arrays);
            sum.add(bench.stream(), elements, places.from, adds, 1, places.to,
                    static_cast<double*>(places.squares.data));
          }};
}

// Of two ranks with gradients in bf16. Both are in this GPU's memory here.
Work mean_of(kernels::DeviceSum& sum, const Bench& bench, std::size_t elements) {
  struct Places {
    Array first, second, to, squares;
  };
  const auto places_of = [elements](Arrays& arrays) {
    Places places;
    places.first = arrays.next(elements, Dtype::kBf16);
    places.second = arrays.next(elements, Dtype::kBf16);
    places.to = arrays.next(elements, Dtype::kF32);
    places.squares = arrays.next(2 * divide_up(elements, kernels::kGridBlock), Dtype::kF32);
    return places;
  };
  Arrays room(nullptr);
  places_of(room);
  const std::size_t bytes = 2 * size_of(Dtype::kBf16) + sizeof(float);
  return {"mean of two ranks", elements, room.bytes(), elements * bytes,
          [&sum, &bench, elements, places_of](std::byte* at) {
            Arrays arrays(at);
            const Places places = places_of(arrays);
            const ConstArray ranks[] = {places.first, places.second};
            sum.mean(bench.stream(), ranks, elements, 0.5f, places.to,
                     static_cast<double*>(places.squares.data));
          }};
}

Json measure(const Options& options) {
  const auto device = open_device(options.device);
  Bench bench(*device, round_up(parse_size(options.memory), device->info().extent_bytes));
  const auto wide = make_optimizer({.name = "adamw", .storage = {Dtype::kF32, true, 1}});
  const auto narrow = make_optimizer({.name = "adamw", .storage = {Dtype::kBf16, false, 1}});
  DeviceUpdate wide_update(*device, *wide), narrow_update(*device, *narrow);
  kernels::DeviceSum sum(*device);
  std::vector<Work> works;
  for (const std::size_t n : options.elements) {
    works.push_back(update_of(wide_update, *wide, bench, "AdamW, f32 masters and state", n, 1));
    works.push_back(update_of(wide_update, *wide, bench, "the same in 20 spans", n, 20));
    works.push_back(update_of(narrow_update, *narrow, bench, "AdamW, bf16 alone", n, 1));
    works.push_back(sum_of(sum, bench, "first gradient", n, false));
    works.push_back(sum_of(sum, bench, "further gradient", n, true));
    works.push_back(mean_of(sum, bench, n));
  }
  Json rows = Json::array();
  const Work copy = copy_of(*device, bench, std::min(kGiB, bench.memory() / 2));
  const double limit = static_cast<double>(copy.bytes) / bench.seconds(copy);
  for (const Work& work : works) {
    if (work.room > bench.memory())
      fail(ErrorCode::kBudget, "{} elements take {} of the GPU's memory; give more than {}", work.elements,
           format_size(work.room), options.memory);
    const double seconds = bench.seconds(work), rate = static_cast<double>(work.bytes) / seconds;
    rows.push_back({{"name", work.name},
                    {"elements", work.elements},
                    {"seconds", seconds},
                    {"rate", rate},
                    {"ratio", rate / limit}});
  }
  return {{"bench", "gpu_kernels"}, {"gpu", device->info().name}, {"copy", limit}, {"rows", rows}};
}

std::string text_of(const Json& found) {
  std::string text = fmt::format("{}: copies read and write {:.0f} GB/s\n",
                                 found.at("gpu").get<std::string>(), found.at("copy").get<double>() / 1e9);
  for (const Json& row : found.at("rows"))
    text += fmt::format("{:30}{:12} elements{:10.1f} us{:8.0f} GB/s, {:.2f} of copies\n",
                        row.at("name").get<std::string>(), row.at("elements").get<std::size_t>(),
                        1e6 * row.at("seconds").get<double>(), row.at("rate").get<double>() / 1e9,
                        row.at("ratio").get<double>());
  return text;
}

}  // namespace
}  // namespace sluice::optim

int main(int count, char** arguments) {
  CLI::App app("Measures the kernels of updates and of sums of gradients on a GPU");
  sluice::optim::Options options;
  app.add_option("--elements", options.elements, "of a launch")->check(CLI::Range(1, 1 << 30));
  app.add_option("--device-memory", options.memory, "of the GPU, which launches use in turn")
      ->capture_default_str();
  app.add_option("--device", options.device, "which GPU")->capture_default_str();
  app.add_flag("--json", options.json, "print JSON");
  CLI11_PARSE(app, count, arguments);
  try {
    const sluice::Json found = sluice::optim::measure(options);
    fmt::print("{}", options.json ? found.dump(2) + "\n" : sluice::optim::text_of(found));
  } catch (const sluice::Error& error) {
    fmt::print(stderr, "gpu_kernels_bench: {}\n", error.what());
    return sluice::exit_status(error.code());
  }
}
