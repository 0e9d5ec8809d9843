#pragma once
#include <cstddef>
#include <dnnl.hpp>
#include <map>
#include <tuple>

#include "kernels/matrix.h"

namespace sluice::kernels {

// Products of f32 or bf16 operands by oneDNN's matmul primitives. A primitive is made for the first product
// of its shape, types and addend, and kept. A run has as many as it has different products; where there are
// kMost, which no run reaches, all are dropped and made anew. The functions throw dnnl::error where oneDNN
// refuses a product. Thread rule: one call at a time.
class Primitives {
 public:
  // The primitives are made for so many of OpenMP's threads.
  explicit Primitives(int threads);

  // Returns the bytes of scratchpad that the product needs, whether it accumulates, has a bias or neither,
  // because a plan asks before that is known. Makes no primitive.
  std::size_t workspace(const Product& product) const;
  // REQUIRES: lda, ldb and ldc are not 0; workspace has workspace(product) bytes.
  void multiply(const Product& product, void* workspace);

 private:
  // All that decides which primitive computes a product.
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
