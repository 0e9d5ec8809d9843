#include <fmt/core.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <dnnl.hpp>
#include <map>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/dnnl/plugin.h"

namespace sluice::kernels {
namespace {

using dnnl::memory;

// What decides which primitive serves a product.
using PrimitiveKey = std::array<std::size_t, 10>;

PrimitiveKey key_of(const Product& product) {
  return {
      product.m,
      product.n,
      product.k,
      product.lda,
      product.ldb,
      product.ldc,
      static_cast<std::size_t>(product.transpose_a),
      static_cast<std::size_t>(product.transpose_b),
      static_cast<std::size_t>(product.accumulate) * 2 + static_cast<std::size_t>(product.bias != nullptr),
      static_cast<std::size_t>(product.c.type)};
}

memory::dim dim(std::size_t value) { return static_cast<memory::dim>(value); }

memory::dims strides(bool transposed, std::size_t row_stride) {
  return transposed ? memory::dims{1, dim(row_stride)} : memory::dims{dim(row_stride), 1};
}

struct Operands {
  memory::desc a, b, c, bias;
};

Operands operands_of(const Product& p) {
  const auto bf16 = memory::data_type::bf16;
  const auto c_type = p.c.type == Dtype::kBf16 ? bf16 : memory::data_type::f32;
  Operands operands;
  operands.a = {{dim(p.m), dim(p.k)},
                bf16,
                strides(p.transpose_a, p.lda           ? p.lda
                                       : p.transpose_a ? p.m
                                                       : p.k)};
  operands.b = {{dim(p.k), dim(p.n)},
                bf16,
                strides(p.transpose_b, p.ldb           ? p.ldb
                                       : p.transpose_b ? p.k
                                                       : p.n)};
  operands.c = {{dim(p.m), dim(p.n)}, c_type, strides(false, p.ldc ? p.ldc : p.n)};
  if (p.bias) operands.bias = {{1, dim(p.n)}, bf16, memory::dims{dim(p.n), 1}};
  return operands;
}

// dnnl_sgemm for f32: measured against the matmul primitive it is as fast on the shapes of a transformer,
// twice as fast on a single row, and it makes no primitive per shape.
class OneDnn final : public MatrixLibrary {
 public:
  explicit OneDnn(int threads) : threads_(threads), engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {}

  // In slices of B's columns, so that what the library packs of them has a bound.
  void multiply_f32(const Product& p) override {
    omp_set_num_threads(threads_);  // a setting of the calling thread
    const std::size_t ldb = p.ldb ? p.ldb : p.transpose_b ? p.k : p.n;
    const std::size_t width = slice_columns(p.n);
    for (std::size_t first = 0; first < p.n; first += width) {
      Product slice = p;
      slice.n = std::min(width, p.n - first);
      slice.b = p.b.at(p.transpose_b ? first * ldb : first);
      slice.c = p.c.at(first);
      slice.lda = p.lda ? p.lda : p.transpose_a ? p.m : p.k;
      slice.ldb = ldb;
      slice.ldc = p.ldc ? p.ldc : p.n;
      multiply_slice(slice);
    }
  }

  // Of both, with a bias and without: a plan asks before there are pointers.
  std::size_t bf16_workspace(const Product& product) const override {
    return with_library_errors(product, [&] {
      Product p = product;
      p.bias = nullptr;
      std::size_t bytes = primitive(p).scratchpad.get_size();
      p.bias = &p;
      if (!p.accumulate) bytes = std::max(bytes, primitive(p).scratchpad.get_size());
      return bytes;
    });
  }

  void multiply_bf16(const Product& product, void* workspace) override {
    with_library_errors(product, [&] { run(product, workspace); });
  }

  bool has_bf16() const override { return has(dnnl::cpu_isa::avx512_core_bf16); }

  std::size_t hidden_bytes(const Product& p) const override {
    const auto threads = static_cast<std::size_t>(threads_);
    const std::size_t depth = std::min(p.k, has(dnnl::cpu_isa::avx512_core) ? kWideDepth : kDepth);
    const std::size_t shared =
        slice_columns(p.n) + (threads > 2 ? std::min(p.m, kPanelColumns * threads) : 0);
    const std::size_t own = std::min(p.m, kPanelRows) * threads;
    const bool primitive = p.a.type == Dtype::kBf16 && has_bf16();
    return (primitive ? kCodeOfPrimitives : kCode) + (shared + own) * depth * sizeof(float) +
           threads * kBesidePanels;
  }

  std::string name() const override {
    const dnnl_version_t* version = dnnl_version();
    return fmt::format("oneDNN {}.{}.{}", version->major, version->minor, version->patch);
  }
  int threads() const override { return threads_; }

 private:
  // The blocks of the library's products in f32, in elements: B's panel is shared, A's is each thread's own.
  // More than two threads share one of A, too.
  static constexpr std::size_t kSlice = 8192, kPanelColumns = 10'000, kPanelRows = 384, kDepth = 256,
                               kWideDepth = 384;
  static constexpr std::size_t kBesidePanels = 64 * kKiB;
  static constexpr std::size_t kCode = 4 * kMiB, kCodeOfPrimitives = 12 * kMiB;

  // All slices of nearly the same width.
  static std::size_t slice_columns(std::size_t n) {
    return n <= kSlice ? n : std::min(n, round_up(divide_up(n, divide_up(n, kSlice)), std::size_t{64}));
  }

  static void multiply_slice(const Product& p) {
    const auto status = dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', dim(p.m), dim(p.n),
                                   dim(p.k), 1.0f, p.a.f32(), dim(p.lda), p.b.f32(), dim(p.ldb),
                                   p.accumulate ? 1.0f : 0.0f, p.c.f32(), dim(p.ldc));
    if (status != dnnl_success)
      fail(ErrorCode::kInternal, "oneDNN refused the product [{}, {}] x [{}, {}] with status {}", p.m, p.k,
           p.k, p.n, static_cast<int>(status));
  }

  static bool has(dnnl::cpu_isa isa) {
    const auto wanted = static_cast<unsigned>(isa);
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & wanted) == wanted;
  }

  struct Primitive {
    dnnl::matmul matmul;
    Operands operands;
    memory::desc scratchpad;
  };

  template <class Body>
  static auto with_library_errors(const Product& p, Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const dnnl::error& error) {
      fail(ErrorCode::kInternal, "oneDNN refused the bf16 product [{}, {}] x [{}, {}]: {}", p.m, p.k, p.k,
           p.n, error.what());
    }
  }

  const Primitive& primitive(const Product& product) const {
    const PrimitiveKey key = key_of(product);
    if (const auto found = primitives_.find(key); found != primitives_.end()) return found->second;
    omp_set_num_threads(threads_);  // a primitive is made for a number of threads
    Primitive made;
    made.operands = operands_of(product);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (product.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    const auto& [a, b, c, bias] = made.operands;
    const auto description = product.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
    const dnnl::matmul::primitive_desc chosen(description, attributes, engine_);
    made.matmul = dnnl::matmul(chosen);
    made.scratchpad = chosen.scratchpad_desc();
    return primitives_.emplace(key, std::move(made)).first->second;
  }

  memory operand(const memory::desc& description, const void* data) const {
    return memory(description, engine_, const_cast<void*>(data));
  }

  void run(const Product& product, void* workspace) {
    omp_set_num_threads(threads_);
    const Primitive& chosen = primitive(product);
    std::unordered_map<int, memory> arguments = {
        {DNNL_ARG_SRC, operand(chosen.operands.a, product.a.data)},
        {DNNL_ARG_WEIGHTS, operand(chosen.operands.b, product.b.data)},
        {DNNL_ARG_DST, operand(chosen.operands.c, product.c.data)},
        {DNNL_ARG_SCRATCHPAD, operand(chosen.scratchpad, workspace)}};
    if (product.bias) arguments.emplace(DNNL_ARG_BIAS, operand(chosen.operands.bias, product.bias));
    chosen.matmul.execute(stream_, arguments);
    stream_.wait();
  }

  int threads_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  mutable std::map<PrimitiveKey, Primitive> primitives_;
};

MatrixLibrary* create(int threads) { return new OneDnn(threads); }

}  // namespace
}  // namespace sluice::kernels

extern "C" __attribute__((visibility("default"))) const sluice::kernels::MatrixPlugin*
sluice_matrix_plugin() {
  static const sluice::kernels::MatrixPlugin plugin = {sluice::kernels::kMatrixPluginAbi,
                                                       sluice::kernels::create};
  return &plugin;
}
