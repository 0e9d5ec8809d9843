#pragma once
#include <array>
#include <cstddef>
#include <dnnl.hpp>
#include <map>

#include "kernels/matrix.h"

namespace sluice::kernels {

// Products by oneDNN's matmul primitives, of f32 or bf16 operands. A primitive is made when the first product
// of its shape, types and addend comes, and kept: of a run there are as many as it has different products.
// Where there are kMost, which no run has, all are made anew. Thread rule: one call at a time. The functions
// throw dnnl::error where oneDNN refuses a product.
class Primitives {
 public:
  // threads: OpenMP's, for which primitives are made.
  explicit Primitives(int threads);

  // Bytes of scratchpad, whether the product accumulates, has a bias or neither: a plan asks before that is
  // known. Nothing is made for it.
  std::size_t workspace(const Product& product) const;
  // REQUIRES: rows' distances are stated; workspace(product) bytes.
  void multiply(const Product& product, void* workspace);

 private:
  // What decides which primitive serves a product.
  using Key = std::array<std::size_t, 11>;
  static constexpr std::size_t kMost = 256;
  struct Primitive {
    dnnl::matmul matmul;
    dnnl::memory::desc a, b, c, bias, scratchpad;
  };
  static Key key_of(const Product& product);
  dnnl::matmul::primitive_desc describe(const Product& product) const;
  const Primitive& primitive(const Product& product);

  int threads_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  mutable std::map<Key, std::size_t> scratchpads_;
  std::map<Key, Primitive> primitives_;
};

}  // namespace sluice::kernels
