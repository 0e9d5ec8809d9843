#include <algorithm>
#include <cstring>
#include <thread>

#include "allocator/memory.h"
#include "bindings/cli/memory_bench.h"
#include "core/bytes.h"
#include "core/error.h"
#include "engine/machine/update_sample.h"
#include "kernels/elementwise.h"

// `bench optimizer` compares updates in memory with loops that only move the same bytes, and with the same
// arithmetic in the caches.
namespace sluice::cli {
namespace {

using Touch = kernels::MemoryStream::Touch;

constexpr std::size_t kColumns = 1024;                         // of an UpdateSample's matrix
constexpr std::size_t kMostOfProducts = std::size_t{4} << 20;  // elements: about a second for an update
static_assert(kElementGrain % kColumns == 0);
// Rows of a matrix whose update stays in a core's caches. With factors for rows and columns there are more
// rows, so that the factors' share is as small as in memory.
constexpr std::size_t kCacheRows = 16, kFactoredCacheRows = 128;

struct Combination {
  optim::OptimizerSettings settings;
  Dtype dtype = Dtype::kF32;
};

std::unique_ptr<optim::Optimizer> training_optimizer(const optim::OptimizerSettings& settings) {
  return optim::make_optimizer(settings, optim::Settings::Defaults::kTraining);
}

// A matrix with all of its optimizer's state and work space, in one region of memory.
class Trial {
 public:
  Trial(Threads& threads, const Combination& combination, std::size_t elements,
        kernels::F32Products* products = nullptr)
      : threads_(threads),
        products_(products),
        optimizer_(training_optimizer(combination.settings)),
        sample_(*optimizer_, combination.dtype, combination.dtype, elements),
        memory_(ledger_, allocator::Purpose::kOptimizerState, bytes(*optimizer_, sample_)),
        parameter_(sample_.parameter(memory_.data())),
        gradient_(sample_.gradient(memory_.data())),
        span_(sample_.span(memory_.data())) {
    lay_out();
    kernels::fill_normal(threads, elements, 1, 1, 0, 0, 0.02f, parameter_);
    kernels::fill_normal(threads, elements, 1, 2, 0, 0, 0.01f, gradient_);
    if (has_master()) kernels::convert(threads, elements, parameter_, {span_.master, Dtype::kF32});
  }

  static std::size_t bytes(const Combination& combination, std::size_t elements) {
    const auto optimizer = training_optimizer(combination.settings);
    return bytes(*optimizer,
                 engine::UpdateSample(*optimizer, combination.dtype, combination.dtype, elements));
  }

  void apply() {
    ++hyperparameters_.step;
    std::memset(span_.whole.scratch, 0, optimizer_->scratch(span_.whole.kind) * sizeof(double));
    for (int round = 0; round < optimizer_->rounds(); ++round) {
      optimizer_->statistics(threads_, round, hyperparameters_, span_);
      optimizer_->combine(threads_, products_, round, hyperparameters_, span_.whole);
    }
    optimizer_->apply(threads_, hyperparameters_, span_);
  }

  // Returns the memory traffic that an update cannot avoid, without the scales of codes, which are a 64th of
  // the codes.
  std::vector<MemoryPass> passes() const {
    const auto stream = [](ConstArray array, std::size_t elements, Touch touch) {
      return kernels::MemoryStream{static_cast<std::byte*>(const_cast<void*>(array.data)),
                                   elements * size_of(array.type), touch};
    };
    const std::size_t elements = span_.count;
    const Array value = has_master() ? Array{span_.master, Dtype::kF32} : parameter_;
    MemoryPass last = {stream(gradient_, elements, Touch::kRead), stream(value, elements, Touch::kUpdate)};
    if (has_master()) last.push_back(stream(parameter_, elements, Touch::kWrite));
    MemoryPass reading = {stream(gradient_, elements, Touch::kRead)};
    for (const optim::StatePart& array : span_.state)
      if (array.values.data != nullptr) {
        last.push_back(stream(array.values, elements, Touch::kUpdate));
        reading.push_back(stream(array.values, elements, Touch::kRead));
      }
    if (optimizer_->rounds() == 0) return {last};
    if (optimizer_->rounds() == 2)  // Adafactor reads gradients and values before it updates
      return {{reading[0], stream(value, elements, Touch::kRead)}, {reading[0]}, last};
    const Array matrix{span_.whole.scratch, Dtype::kF32};  // Muon's direction uses gradient and momentum
    reading.push_back(stream(matrix, elements, Touch::kWrite));
    last.push_back(stream(matrix, elements, Touch::kRead));
    return {reading, last};
  }

  // Runs only the products of Muon's iteration.
  void multiply() {
    constexpr int kIterations = 5;
    const auto [k, n] = std::minmax(span_.whole.kind.shape[0], span_.whole.kind.shape[1]);
    auto* const matrix = reinterpret_cast<float*>(span_.whole.scratch);
    auto* const gram = reinterpret_cast<float*>(span_.whole.workspace);
    float* const slice = gram + 2 * k * k;
    const auto product = [&](std::size_t rows, std::size_t columns, std::size_t depth, const float* a,
                             const float* b, float* c, bool transpose_a) {
      kernels::Product p;
      p.m = rows, p.n = columns, p.k = depth;
      p.a = {a, Dtype::kF32}, p.b = {b, Dtype::kF32}, p.c = {c, Dtype::kF32};
      p.transpose_a = transpose_a;
      products_->multiply_f32(p);
    };
    for (int i = 0; i < kIterations; ++i) {
      product(k, k, n, matrix, matrix, gram, true);
      product(k, k, k, gram, gram, gram + k * k, false);
      product(n, k, k, matrix, gram, slice, false);
    }
  }
  bool has_products() const { return optimizer_->largest_product(span_.whole.kind).m > 0; }

 private:
  static constexpr std::size_t kLine = 64;

  static std::size_t whole_bytes(const optim::Optimizer& optimizer, const optim::Kind& kind) {
    std::size_t elements = 0;
    for (const optim::WholeArray& array : optimizer.whole_state(kind.shape)) elements += array.elements();
    return round_up(elements * sizeof(float), kLine);
  }
  static std::size_t bytes(const optim::Optimizer& optimizer, const engine::UpdateSample& sample) {
    const optim::Kind kind = sample.kind();
    return round_up(sample.bytes(), kLine) + whole_bytes(optimizer, kind) +
           round_up(optimizer.scratch(kind) * sizeof(double), kLine) + optimizer.workspace(kind);
  }
  bool has_master() const { return parameter_.type != Dtype::kF32 && span_.master != nullptr; }

  // Sets what an update of the whole parameter needs, behind what the sample has.
  void lay_out() {
    std::byte* at = memory_.data() + round_up(sample_.bytes(), kLine);
    const auto take = [&](std::size_t size) { return std::exchange(at, at + size); };
    optim::Whole& whole = span_.whole;
    whole.state = reinterpret_cast<float*>(take(whole_bytes(*optimizer_, whole.kind)));
    const std::size_t scratch = optimizer_->scratch(whole.kind) * sizeof(double);
    whole.scratch = reinterpret_cast<double*>(take(round_up(scratch, kLine)));
    whole.workspace = at;
  }

  Threads& threads_;
  kernels::F32Products* products_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  engine::UpdateSample sample_;
  allocator::Ledger ledger_;
  allocator::Region memory_;
  Array parameter_, gradient_;
  optim::Span span_;
  optim::Hyperparameters hyperparameters_{1e-3, 0.1, 1, 0};
};

// The same update on every thread separately, with so few elements that they stay in the core's caches.
class CacheTrials {
 public:
  CacheTrials(int threads, const Combination& combination) {
    for (int i = 0; i < threads; ++i) each_.push_back(std::make_unique<One>(combination));
  }
  double rate(double seconds) const {  // bytes per second of all threads
    std::vector<double> rates(each_.size());
    std::vector<std::thread> workers;
    for (std::size_t i = 0; i < each_.size(); ++i)
      workers.emplace_back([&, i] {
        Trial& trial = each_[i]->trial;
        rates[i] = rate_of(bytes_moved(trial.passes()), seconds, [&] { trial.apply(); });
      });
    for (std::thread& worker : workers) worker.join();
    double sum = 0;
    for (const double rate : rates) sum += rate;
    return sum;
  }

 private:
  struct One {
    explicit One(const Combination& combination)
        : trial(thread, combination, rows_of(combination) * kColumns) {}
    static std::size_t rows_of(const Combination& combination) {
      const bool factored = training_optimizer(combination.settings)->rounds() > 0;
      return factored ? kFactoredCacheRows : kCacheRows;
    }
    Threads thread{1};
    Trial trial;
  };
  std::vector<std::unique_ptr<One>> each_;
};

// Returns all distinct combinations: f32 parameters are their own masters, and f16 parameters need masters.
std::vector<Combination> combinations(const BenchOptions& options) {
  std::vector<Combination> all;
  const bool has_state = !training_optimizer({.name = options.optimizer})->state().empty();
  for (const char* dtype : {"f32", "bf16", "f16"})
    for (const std::string& state : optim::state_type_names())
      for (const char* master : {"f32", "none"}) {
        const bool asked = (!options.dtype || *options.dtype == dtype) &&
                           (!options.state || *options.state == state) &&
                           (!options.master || *options.master == master);
        const bool own_master = std::string(dtype) != "bf16" && std::string(master) == "none";
        if (!asked || own_master || (!has_state && state != "f32")) continue;
        Combination c;
        c.settings.name = options.optimizer;
        c.settings.storage = {*optim::state_type_from_name(state), std::string(master) == "f32", 1};
        c.dtype = *dtype_from_name(dtype);
        all.push_back(std::move(c));
      }
  if (!all.empty()) return all;
  if (!has_state && options.state && *options.state != "f32")
    fail(ErrorCode::kInvalidArgument,
         "--state {}: without momentum {} has no array to have this type; leave --state out", *options.state,
         options.optimizer);
  fail(ErrorCode::kInvalidArgument,
       "--master none is for bf16 parameters, since f32 parameters are their own masters and f16 ones need "
       "masters; give --dtype bf16, or leave --master out");
}

std::string name_of(const Combination& c) {
  const optim::Storage& storage = c.settings.storage;
  return fmt::format("{} {}, state {}{}", c.settings.name, sluice::name_of(c.dtype),
                     optim::state_type_name(storage.state),
                     c.dtype == Dtype::kF32 ? ""
                     : storage.master       ? ", master f32"
                                            : ", no master");
}

void measure(Threads& threads, kernels::F32Products* products, const Combination& combination,
             std::size_t elements, double seconds, BenchReport& report, BenchProgress& progress) {
  require_free_memory(Trial::bytes(combination, elements), "give fewer --elements");
  Trial trial(threads, combination, elements, products);
  MemoryWork work{name_of(combination), trial.passes(), [&] { trial.apply(); }, {}, {}};
  std::optional<CacheTrials> caches;
  if (trial.has_products()) {
    work.products = [&] { trial.multiply(); };
  } else {
    caches.emplace(report.threads, combination);
    work.arithmetic = [&](double round) { return caches->rate(round); };
  }
  const double moved = static_cast<double>(bytes_moved(work.passes)) / static_cast<double>(elements);
  MemoryBench bench(threads, report);
  bench.add(std::move(work));
  bench.measure(seconds, progress);
  BenchRow& row = report.rows.back();
  row.more.update({{"elements_per_second", row.reached / moved}, {"bytes_per_element", moved}});
}

}  // namespace

BenchReport bench_optimizer(const BenchOptions& options, BenchProgress& progress) {
  if (options.elements == 0)
    fail(ErrorCode::kInvalidArgument, "--elements: 0 elements leave nothing to measure");
  if (options.elements > std::uint64_t{1} << 40)
    fail(ErrorCode::kInvalidArgument, "--elements: {} are more than any machine can hold", options.elements);
  std::size_t elements = round_up(options.elements, kElementGrain);
  BenchReport report;
  report.bench = "optimizer";
  report.threads = thread_count(options);
  std::unique_ptr<kernels::MatrixLibrary> library;
  if (options.optimizer == "muon") {
    library = kernels::load_matrix_library(report.threads);
    if (elements > kMostOfProducts)
      report.notes.push_back(
          fmt::format("{} elements are updated instead of {}, because muon's products take long",
                      kMostOfProducts, elements));
    elements = std::min(elements, kMostOfProducts);
  }
  report.settings = {{"optimizer", options.optimizer}, {"elements", elements}};
  Threads threads(report.threads);
  const std::vector<Combination> all = combinations(options);
  for (const Combination& c : all)
    measure(threads, library.get(), c, elements, options.seconds / static_cast<double>(all.size()), report,
            progress);
  return report;
}

}  // namespace sluice::cli
