#include <fmt/core.h>
#include <omp.h>

#include <algorithm>
#include <dnnl.hpp>
#include <string>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/dnnl/plugin.h"
#include "kernels/dnnl/primitives.h"

namespace sluice::kernels {
namespace {

bool has(dnnl::cpu_isa isa) {
  const auto wanted = static_cast<unsigned>(isa);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & wanted) == wanted;
}

// The widest instruction set first; each includes those after it.
std::string instruction_set() {
  using Isa = dnnl::cpu_isa;
  constexpr std::pair<Isa, const char*> kNames[] = {{Isa::avx512_core_amx, "avx512_core_amx"},
                                                    {Isa::avx512_core_bf16, "avx512_core_bf16"},
                                                    {Isa::avx512_core_vnni, "avx512_core_vnni"},
                                                    {Isa::avx512_core, "avx512_core"},
                                                    {Isa::avx2_vnni, "avx2_vnni"},
                                                    {Isa::avx2, "avx2"}};
  for (const auto& [isa, name] : kNames)
    if (has(isa)) return name;
  return "less than avx2";
}

class OneDnn final : public MatrixLibrary {
 public:
  explicit OneDnn(int threads) : threads_(threads), primitives_(threads) {}

  // Multiplies slices of B's columns, so that the memory for the library's packed panels has a bound.
  void multiply_f32(const Product& product) override {
    const Product p = dense(product);
    omp_set_num_threads(threads_);  // a setting of the calling thread
    const std::size_t width = slice_columns(p.n);
    for (std::size_t first = 0; first < p.n; first += width) {
      Product slice = p;
      slice.n = std::min(width, p.n - first);
      slice.b = p.b.at(p.transpose_b ? first * p.ldb : first);
      slice.c = p.c.at(first);
      multiply_slice(slice);
    }
  }

  std::size_t hidden_bytes(const Product& p) const override {
    const auto threads = static_cast<std::size_t>(threads_);
    const std::size_t depth = std::min(p.k, has(dnnl::cpu_isa::avx512_core) ? kWideDepth : kDepth);
    const std::size_t shared =
        slice_columns(p.n) + (threads > 2 ? std::min(p.m, kPanelColumns * threads) : 0);
    const std::size_t own = std::min(p.m, kPanelRows) * threads;
    return kCode + (shared + own) * depth * sizeof(float) + threads * kBesidePanels;
  }

  // kernels/README.md gives this rule and its measurements.
  bool has_primitive(const Product& p) const override {
    if (p.a.type == Dtype::kBf16) return true;
    if (!p.transpose_b || p.transpose_a || p.m < kFewRows || !has(dnnl::cpu_isa::avx512_core)) return false;
    if (threads_ == 1) return p.m <= kManyRows / 2;
    return p.m <= kManyRows || (p.n <= kNarrow && p.k >= 4 * p.n);
  }
  std::size_t primitive_bytes(Dtype type) const override { return (type == Dtype::kBf16 ? 512 : 256) * kKiB; }

  std::size_t primitive_workspace(const Product& p) const override {
    return with_library_errors(p, [&] { return primitives_.workspace(p); });
  }
  void multiply_by_primitive(const Product& p, void* workspace) override {
    with_library_errors(p, [&] { primitives_.multiply(p, workspace); });
  }

  bool has_bf16() const override { return has(dnnl::cpu_isa::avx512_core_bf16); }
  int threads() const override { return threads_; }
  std::string name() const override {
    const dnnl_version_t* version = dnnl_version();
    return fmt::format("oneDNN {}.{}.{} for {}", version->major, version->minor, version->patch,
                       instruction_set());
  }

 private:
  // Block sizes of the library's f32 products, in elements. The threads share B's panel, and each packs its
  // own of A; with more than two threads they share a panel of A, too.
  static constexpr std::size_t kSlice = 8192, kPanelColumns = 10'000, kPanelRows = 384, kDepth = 256,
                               kWideDepth = 384;
  static constexpr std::size_t kBesidePanels = 64 * kKiB, kCode = 4 * kMiB;
  static constexpr std::size_t kFewRows = 8, kManyRows = 512, kNarrow = 1024;

  // All slices have nearly the same width.
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
  static dnnl_dim_t dim(std::size_t value) { return static_cast<dnnl_dim_t>(value); }

  template <class Body>
  static auto with_library_errors(const Product& p, Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const dnnl::error& error) {
      fail(ErrorCode::kInternal, "oneDNN refused the {} product [{}, {}] x [{}, {}]: {}", name_of(p.a.type),
           p.m, p.k, p.k, p.n, error.what());
    }
  }

  int threads_;
  Primitives primitives_;
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
