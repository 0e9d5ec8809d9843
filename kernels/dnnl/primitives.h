#pragma once
#include <cstddef>
#include <dnnl.hpp>
#include <map>
#include <tuple>

#include "kernels/matrix.h"

namespace sluice::kernels {

// Products of f32 or bf16 operands by oneDNN's matmul primitives. A primitive is made at the first product of
// its shape, types and addend, and cached. A run needs one for each different product; at kMost, which no run
// reaches, the cache is cleared. The functions throw dnnl::error where oneDNN refuses a product. Thread rule:
// one call at a time.
class Primitives {
 public:
  // Primitives are made for this many OpenMP threads.
  explicit Primitives(int threads);

  // Returns the bytes of scratchpad that suffice for the product with accumulation, a bias or neither,
  // because a plan asks before that is known. Makes no primitive.
  std::size_t workspace(const Product& product) const;
  // REQUIRES: lda, ldb and ldc are not 0; workspace has workspace(product) bytes.
  void multiply(const Product& product, void* workspace);

 private:
  // Everything that selects the primitive of a product.
  using Key = std::tuple<ProductKey, bool, bool>;  // accumulates, has a bias
  static constexpr std::size_t kMost = 256;
  struct Primitive {
    dnnl::matmul matmul;
    dnnl::memory::desc a, b, c, bias, scratchpad;
  };
  dnnl::matmul::primitive_desc describe(const Product& product) const;
  const Primitive& primitive(const Product& product);

  int threads_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  mutable std::map<Key, std::size_t> scratchpads_;
  std::map<Key, Primitive> primitives_;
};

}  // namespace sluice::kernels
