#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// C[m, n] = A[m, k] * B[k, n] (+ C where accumulate), row-major, accumulated in f32. With transpose_a, A is
// stored as [k, m]; with transpose_b, B is stored as [n, k]. lda, ldb and ldc are the row strides in
// elements, as stored; 0 means dense. A and B are of one type (f32, bf16 or f16); C is f32 or of that type.
struct Product {
  std::size_t m = 0, n = 0, k = 0;
  ConstArray a, b;
  Array c;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  std::size_t lda = 0, ldb = 0, ldc = 0;
  const void* bias = nullptr;  // [n], of A's type, added to every row, or null. Not with accumulate
};
// Returns the product with dense row strides filled in.
inline Product dense(Product p) {
  if (p.lda == 0) p.lda = p.transpose_a ? p.m : p.k;
  if (p.ldb == 0) p.ldb = p.transpose_b ? p.k : p.n;
  if (p.ldc == 0) p.ldc = p.n;
  return p;
}
// Sizes, strides and types of a product: a key for caches.
using ProductKey = std::array<std::size_t, 10>;
inline ProductKey key_of(const Product& p) {
  return {p.m,
          p.n,
          p.k,
          p.lda,
          p.ldb,
          p.ldc,
          p.transpose_a,
          p.transpose_b,
          static_cast<std::size_t>(p.a.type),
          static_cast<std::size_t>(p.c.type)};
}

// Products in f32 by a library, on the library's own threads. Repeated calls give the same bits on the same
// kind of machine with the same number of threads. Thread rule: one call at a time, and never together with a
// loop on Threads.
class F32Products {
 public:
  virtual ~F32Products() = default;
  // Computes C = op(A) * op(B). REQUIRES: all operands are f32, and there is no bias.
  virtual void multiply_f32(const Product& product) = 0;
  // Returns an upper bound for the bytes that the library allocates internally for this product: generated
  // code, packed panels of the operands. It reuses them, so a series of products needs the largest bound
  // among them. bench/kernels/matrix_bench.cc --hidden measures them.
  virtual std::size_t hidden_bytes(const Product& product) const = 0;
};

// BLAS' sgemm with 32-bit integers (Dongarra et al. 1990) as Fortran declares it: columns are contiguous, and
// every argument is an address.
using Sgemm = void (*)(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                       const int* k, const float* alpha, const float* a, const int* lda, const float* b,
                       const int* ldb, const float* beta, float* c, const int* ldc);
// Products by a BLAS that the caller's process has loaded. hidden_bytes() is 0, because the caller accounts
// for that BLAS. multiply_f32() throws Error(kInvalidArgument) for sizes beyond 32-bit integers.
std::unique_ptr<F32Products> make_blas_products(Sgemm sgemm);

// Products of all types by a vendor's library. Some are computed by a *primitive*: code that the library
// generates and caches for a product's shape, types and strides.
class MatrixLibrary : public F32Products {
 public:
  // Whether a primitive computes the product; otherwise multiply_f32() does. The bits depend on it, so it
  // follows from the product, the CPU's instruction set and the number of threads, never from a measurement.
  // REQUIRES: the operands' type has has_products_of().
  virtual bool has_primitive(const Product& product) const = 0;
  // Returns the bytes of workspace that suffice for the product's primitive with or without accumulate or a
  // bias.
  virtual std::size_t primitive_workspace(const Product& product) const = 0;
  // Computes the product, with a bias where one is given. REQUIRES: lda, ldb and ldc are not 0; workspace has
  // primitive_workspace() bytes.
  virtual void multiply_by_primitive(const Product& product, void* workspace) = 0;
  // Returns an upper bound for the code that the library caches for each product of this type with a
  // primitive. Memory that it allocates once for all primitives is in hidden_bytes() of any product.
  virtual std::size_t primitive_bytes(Dtype type) const = 0;
  virtual bool has_bf16() const = 0;     // whether this CPU has bf16 instructions
  virtual std::string name() const = 0;  // everything that bits depend on: "oneDNN 2.6.3 for avx512_core"
  virtual int threads() const = 0;
};

// Loads the plug-in (libsluice_dnnl.so, from SLUICE_LIBRARY_PATH, beside libsluice.so, or on the system's
// path), and makes its OpenMP threads wait passively. Throws Error(kNotFound) that says what to install.
std::unique_ptr<MatrixLibrary> load_matrix_library(int threads);

// Whether the library multiplies operands of this type without widening them. False for f16, whose products
// it does not accumulate in f32 on every CPU.
inline bool has_products_of(Dtype type, const MatrixLibrary& library) {
  return type == Dtype::kF32 || (type == Dtype::kBf16 && library.has_bf16());
}

// Returns the bytes of workspace for multiply(), which a plan counts; of a, b and c only the types matter.
// Operands that the library cannot multiply are widened to f32 there. B is widened in slices along n, with at
// most kWidenedSlice elements each; so the slices follow from the shape alone.
inline constexpr std::size_t kWidenedSlice = std::size_t{4} << 20;
std::size_t product_workspace(const Product& product, const MatrixLibrary& library);

// Collects the memory needs of a set of products, before any of them runs.
class ProductSurvey {
 public:
  // hidden_bytes: internal bytes that the library needs for f32 products outside of the set.
  explicit ProductSurvey(const MatrixLibrary& library, std::size_t hidden_bytes = 0)
      : library_(library), hidden_bytes_(hidden_bytes) {}
  std::size_t workspace(const Product& product);  // product_workspace(); also adds the product
  int threads() const { return library_.threads(); }
  std::size_t hidden_bytes() const { return hidden_bytes_ + primitive_bytes_; }  // for the products so far
  const std::vector<Product>& products() const { return products_; }  // all so far, with repetitions
  const MatrixLibrary& library() const { return library_; }

 private:
  const MatrixLibrary& library_;
  std::size_t hidden_bytes_, primitive_bytes_ = 0;
  std::set<ProductKey> primitives_;  // of products that have one
  std::vector<Product> products_;
};

void multiply(MatrixLibrary& library, Threads& threads, const Product& product, void* workspace);

}  // namespace sluice::kernels
