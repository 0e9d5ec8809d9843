#include "kernels/matrix.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "core/plugin.h"
#include "kernels/dnnl/plugin.h"
#include "kernels/elementwise.h"

namespace sluice::kernels {
namespace {

constexpr std::size_t kAlignment = 64;

// --- the plug-in
// -------------------------------------------------------------------------------------------------

// With RTLD_DEEPBIND oneDNN finds the plug-in's own memory functions first (dnnl/scratch.cc). The sanitizers
// have such functions themselves, and refuse the flag.
#if defined(RTLD_DEEPBIND) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr int kHowToOpen = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
#else
constexpr int kHowToOpen = RTLD_NOW | RTLD_LOCAL;
#endif

const MatrixPlugin& plugin() {
  // libgomp reads it once, when it is loaded. Spinning threads would take cores from oneTBB and from I/O.
  setenv("OMP_WAIT_POLICY", "passive", 0);
  return *static_cast<const MatrixPlugin*>(
      open_plugin(kMatrixPluginFile, kMatrixPluginSymbol, kMatrixPluginAbi, kHowToOpen, "the matrix library",
                  "install oneDNN (Debian, Ubuntu: libdnnl2 or libdnnl3)"));
}

// --- shapes
// ------------------------------------------------------------------------------------------------------

void check(const Product& p) {
  if (!is_float(p.a.type) || p.a.type != p.b.type || (p.c.type != Dtype::kF32 && p.c.type != p.a.type))
    fail(ErrorCode::kInvalidArgument,
         "a product of {} and {} into {} is not supported: A and B must both be f32, both bf16 or both f16, "
         "and C must be f32 or of that type",
         name_of(p.a.type), name_of(p.b.type), name_of(p.c.type));
  if (p.k == 0)
    fail(ErrorCode::kInvalidArgument, "a product [{}, 0] x [0, {}] has nothing to add: k must be at least 1",
         p.m, p.n);
  if (p.bias && p.accumulate)
    fail(ErrorCode::kInvalidArgument, "a product cannot both accumulate and add a bias");
  if (p.lda < (p.transpose_a ? p.m : p.k) || p.ldb < (p.transpose_b ? p.k : p.n) || p.ldc < p.n)
    fail(ErrorCode::kInvalidArgument,
         "a product [{}, {}] x [{}, {}] has rows that overlap: lda {}, ldb {}, ldc {}", p.m, p.k, p.k, p.n,
         p.lda, p.ldb, p.ldc);
}

// Returns how many columns of B and C are widened at once. A narrow C needs an f32 slice, too, with the same
// bound.
std::size_t slice_columns(const Product& p) {
  const std::size_t rows = std::max<std::size_t>({p.k, p.c.type != Dtype::kF32 ? p.m : 0, 1});
  std::size_t columns = std::max<std::size_t>(kWidenedSlice / rows, 1);
  if (columns > 16) columns = columns / 16 * 16;
  return std::min(columns, p.n);
}

struct WidenedLayout {
  std::size_t a, b, c, total;  // offsets in bytes
};

WidenedLayout widened_layout(const Product& p) {
  const std::size_t columns = slice_columns(p);
  const auto bytes = [](std::size_t elements) { return round_up(elements * sizeof(float), kAlignment); };
  WidenedLayout layout{};
  layout.b = bytes(p.m * p.k);
  layout.c = layout.b + bytes(columns * p.k);
  layout.total = layout.c + (p.c.type != Dtype::kF32 ? bytes(p.m * columns) : 0);
  return layout;
}

// Returns the f32 product of `columns` columns of B and C, with operands without addresses.
Product widened_shape(const Product& p, std::size_t columns) {
  Product slice;
  slice.m = p.m;
  slice.n = columns;
  slice.k = p.k;
  slice.transpose_a = p.transpose_a;
  slice.transpose_b = p.transpose_b;
  slice.accumulate = p.accumulate;
  slice.ldc = p.c.type != Dtype::kF32 ? columns : p.ldc;
  return dense(slice);
}

// Visits the products that the library computes: the product itself, or its widened slices of each width.
template <class Visit>
void for_each_part(const Product& p, const MatrixLibrary& library, Visit&& visit) {
  if (has_products_of(p.a.type, library)) return visit(p);
  const std::size_t columns = slice_columns(p);
  visit(widened_shape(p, columns));
  if (p.n % columns != 0) visit(widened_shape(p, p.n % columns));
}

// --- the ways to a product
// ---------------------------------------------------------------------------------------

// Multiplies by the primitive, or by multiply_f32(). In the latter case the bias is written to every row of C
// first, and the product accumulated, which saves one pass over C.
void multiply_part(MatrixLibrary& library, Threads& threads, Product p, void* workspace) {
  if (library.has_primitive(p)) return library.multiply_by_primitive(p, workspace);
  if (p.bias) {
    convert_rows(threads, p.m, p.n, {p.bias, Dtype::kF32}, 0, p.c, p.ldc);
    p.bias = nullptr;
    p.accumulate = true;
  }
  library.multiply_f32(p);
}

void multiply_slice(MatrixLibrary& library, Threads& threads, const Product& p, std::byte* workspace,
                    std::size_t first, std::size_t columns) {
  const WidenedLayout layout = widened_layout(p);
  const Array b{workspace + layout.b, Dtype::kF32};
  const bool narrows = p.c.type != Dtype::kF32;
  Product slice = widened_shape(p, columns);
  slice.a = {workspace, Dtype::kF32};
  slice.b = b;
  slice.c = narrows ? Array{workspace + layout.c, Dtype::kF32} : p.c.at(first);
  if (p.transpose_b)
    convert_rows(threads, columns, p.k, p.b.at(first * p.ldb), p.ldb, b, p.k);
  else
    convert_rows(threads, p.k, columns, p.b.at(first), p.ldb, b, columns);
  if (p.bias) {
    convert_rows(threads, p.m, columns, ConstArray{p.bias, p.a.type}.at(first), 0, slice.c, slice.ldc);
    slice.accumulate = true;
  } else if (narrows && p.accumulate) {
    convert_rows(threads, p.m, columns, p.c.at(first), p.ldc, slice.c, columns);
  }
  multiply_part(library, threads, slice, workspace + layout.total);
  if (narrows) convert_rows(threads, p.m, columns, slice.c, columns, p.c.at(first), p.ldc);
}

void multiply_widened(MatrixLibrary& library, Threads& threads, const Product& p, std::byte* workspace) {
  const std::size_t rows = p.transpose_a ? p.k : p.m, width = p.transpose_a ? p.m : p.k;
  convert_rows(threads, rows, width, p.a, p.lda, {workspace, Dtype::kF32}, width);
  const std::size_t columns = slice_columns(p);
  for (std::size_t first = 0; first < p.n; first += columns)
    multiply_slice(library, threads, p, workspace, first, std::min(columns, p.n - first));
}

}  // namespace

std::unique_ptr<MatrixLibrary> load_matrix_library(int threads) {
  if (threads < 1)
    fail(ErrorCode::kInvalidArgument, "the matrix library was asked to use {} threads; it needs at least 1",
         threads);
  return std::unique_ptr<MatrixLibrary>(plugin().create(threads));
}

std::size_t product_workspace(const Product& product, const MatrixLibrary& library) {
  const Product p = dense(product);
  check(p);
  if (p.m == 0 || p.n == 0) return 0;
  std::size_t of_parts = 0;
  for_each_part(p, library, [&](const Product& part) {
    if (library.has_primitive(part)) of_parts = std::max(of_parts, library.primitive_workspace(part));
  });
  return of_parts + (has_products_of(p.a.type, library) ? 0 : widened_layout(p).total);
}

std::size_t ProductSurvey::workspace(const Product& product) {
  products_.push_back(product);
  const std::size_t bytes = product_workspace(product, library_);
  if (product.m == 0 || product.n == 0) return bytes;
  for_each_part(dense(product), library_, [&](const Product& p) {
    const bool has_primitive = library_.has_primitive(p);
    hidden_bytes_ = std::max(hidden_bytes_, library_.hidden_bytes(has_primitive ? Product{} : p));
    if (!has_primitive) return;
    if (primitives_.insert(key_of(p)).second) primitive_bytes_ += library_.primitive_bytes(p.a.type);
  });
  return bytes;
}

void multiply(MatrixLibrary& library, Threads& threads, const Product& product, void* workspace) {
  const Product p = dense(product);
  check(p);
  if (p.m == 0 || p.n == 0) return;
  if (has_products_of(p.a.type, library))
    multiply_part(library, threads, p, workspace);
  else
    multiply_widened(library, threads, p, static_cast<std::byte*>(workspace));
}

}  // namespace sluice::kernels
