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

// C[m, n] = A[m, k] * B[k, n] (+ C where accumulate), row-major, accumulated in f32.
// transpose_a: A is stored as [k, m]; transpose_b: B is stored as [n, k]. lda, ldb, ldc: elements from row to
// row as stored; 0 means dense. A and B are of one type (f32, bf16 or f16); C is f32
// or of that type.
struct Product {
  std::size_t m = 0, n = 0, k = 0;
  ConstArray a, b;
  Array c;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  std::size_t lda = 0, ldb = 0, ldc = 0;
  const void* bias = nullptr;  // [n], of A's type, added to every row; null: none. Not with accumulate
};

// Products in f32, by whatever library a process has for them, with its own threads: one call at a time, and
// never together with a loop on Threads. The same call repeats its bits on the same kind of machine with the
// same number of threads.
class F32Products {
 public:
  virtual ~F32Products() = default;
  // C = op(A) * op(B), all operands f32. No bias.
  virtual void multiply_f32(const Product& product) = 0;
  // Bytes that the library takes for itself for this product: code made at run time, packed panels of the
  // operands. What it took for one product serves the next, so that a series takes the most over its
  // products. A bound: bench/kernels/matrix_bench.cc --hidden measures it.
  virtual std::size_t hidden_bytes(const Product& product) const = 0;
};

// BLAS' sgemm with 32-bit integers (Dongarra et al. 1990), as Fortran has it: columns are contiguous, every
// argument is an address.
using Sgemm = void (*)(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                       const int* k, const float* alpha, const float* a, const int* lda, const float* b,
                       const int* ldb, const float* beta, float* c, const int* ldc);
// Those of a caller whose process has a BLAS already. hidden_bytes() is 0: what that BLAS takes is the
// caller's. multiply_f32() throws Error(kInvalidArgument) for a product that 32-bit integers cannot state.
std::unique_ptr<F32Products> make_blas_products(Sgemm sgemm);

// Matrix products of a vendor's library, of all types. Some go to a *primitive*: code that the library makes
// for one product, by its shape, types and strides, and keeps.
class MatrixLibrary : public F32Products {
 public:
  // Whether the product goes to a primitive; otherwise multiply_f32() has it. A rule of the product, the
  // CPU's instruction set and the threads, never of a measurement, since the bits follow it. REQUIRES:
  // operands of a type that has_products_of() names.
  virtual bool has_primitive(const Product& product) const = 0;
  // Bytes, at any addend.
  virtual std::size_t primitive_workspace(const Product& product) const = 0;
  // The same product, with a bias where one is given. REQUIRES: rows' distances are stated, and that
  // workspace.
  virtual void multiply_by_primitive(const Product& product, void* workspace) = 0;
  // A bound for what the library keeps for each product of this type that has a primitive, with and without
  // an addend: the code. What it takes once for all of them is in hidden_bytes() of any product.
  virtual std::size_t primitive_bytes(Dtype type) const = 0;
  virtual bool has_bf16() const = 0;     // whether this CPU has instructions for it
  virtual std::string name() const = 0;  // "oneDNN 2.6.3 for avx512_core": what the bits depend on
  virtual int threads() const = 0;
};

// Loads the plug-in (libsluice_dnnl.so, beside libsluice.so or in SLUICE_LIBRARY_PATH). Its OpenMP threads
// are told to wait passively. Throws Error(kNotFound) with what to install.
std::unique_ptr<MatrixLibrary> load_matrix_library(int threads);

// Whether the library multiplies operands of this type as they are. f16 it does not: its products of f16 are
// not everywhere accumulated in f32.
inline bool has_products_of(Dtype type, const MatrixLibrary& library) {
  return type == Dtype::kF32 || (type == Dtype::kBf16 && library.has_bf16());
}

// Products of any of the types above. A plan counts the workspace. Operands that the library does not
// multiply as they are are widened to f32 in `workspace`, B in slices of its n so that a widened slice has at
// most kWidenedSlice elements: a rule of shapes alone.
inline constexpr std::size_t kWidenedSlice = std::size_t{4} << 20;
std::size_t product_workspace(const Product& product,
                              const MatrixLibrary& library);  // bytes; of a, b, c only the types matter

// What a set of products needs, asked product by product before any of them runs.
class ProductSurvey {
 public:
  // hidden_bytes: what the library takes in any case for other products of f32.
  explicit ProductSurvey(const MatrixLibrary& library, std::size_t hidden_bytes = 0)
      : library_(library), hidden_bytes_(hidden_bytes) {}
  std::size_t workspace(const Product& product);  // product_workspace(), and the product is remembered
  int threads() const { return library_.threads(); }
  std::size_t hidden_bytes() const { return hidden_bytes_ + primitive_bytes_; }  // for all so far
  const std::vector<Product>& products() const { return products_; }  // all so far, as often as asked
  const MatrixLibrary& library() const { return library_; }

 private:
  const MatrixLibrary& library_;
  std::size_t hidden_bytes_, primitive_bytes_ = 0;
  std::set<std::array<std::size_t, 10>> primitives_;  // products that have one: sizes, strides, types
  std::vector<Product> products_;
};

void multiply(MatrixLibrary& library, Threads& threads, const Product& product, void* workspace);

}  // namespace sluice::kernels
