#include "kernels/dnnl/primitives.h"

#include <omp.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace sluice::kernels {
namespace {

using dnnl::memory;

memory::dim dim(std::size_t value) { return static_cast<memory::dim>(value); }

memory::data_type data_type(Dtype type) {
  return type == Dtype::kBf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc matrix(std::size_t rows, std::size_t columns, Dtype type, bool transposed, std::size_t stride) {
  return {{dim(rows), dim(columns)},
          data_type(type),
          transposed ? memory::dims{1, dim(stride)} : memory::dims{dim(stride), 1}};
}

struct Operands {
  memory::desc a, b, c, bias;
};

Operands operands_of(const Product& product) {
  const Product p = dense(product);
  Operands operands;
  operands.a = matrix(p.m, p.k, p.a.type, p.transpose_a, p.lda);
  operands.b = matrix(p.k, p.n, p.a.type, p.transpose_b, p.ldb);
  operands.c = matrix(p.m, p.n, p.c.type, false, p.ldc);
  if (p.bias) operands.bias = matrix(1, p.n, p.a.type, false, p.n);
  return operands;
}

}  // namespace

Primitives::Primitives(int threads)
    : threads_(threads), engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
  dnnl::set_primitive_cache_capacity(0);  // otherwise the library would cache 1,024 primitives itself
}

dnnl::matmul::primitive_desc Primitives::describe(const Product& p) const {
  omp_set_num_threads(threads_);  // a setting of the calling thread, for which the primitive is made
  const auto [a, b, c, bias] = operands_of(p);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (p.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const auto description = p.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  return {description, attributes, engine_};
}

std::size_t Primitives::workspace(const Product& product) const {
  std::size_t bytes = 0;
  for (const bool accumulate : {false, true})
    for (const bool bias : {false, true}) {
      if (accumulate && bias) continue;
      Product p = product;
      p.accumulate = accumulate;
      p.bias = bias ? &p : nullptr;
      const Key key(key_of(p), p.accumulate, p.bias != nullptr);
      auto found = scratchpads_.find(key);
      if (found == scratchpads_.end())
        found = scratchpads_.emplace(key, describe(p).scratchpad_desc().get_size()).first;
      bytes = std::max(bytes, found->second);
    }
  return bytes;
}

const Primitives::Primitive& Primitives::primitive(const Product& product) {
  const Key key(key_of(product), product.accumulate, product.bias != nullptr);
  if (const auto found = primitives_.find(key); found != primitives_.end()) return found->second;
  if (primitives_.size() == kMost) primitives_.clear();
  const auto chosen = describe(product);
  const auto [a, b, c, bias] = operands_of(product);
  return primitives_.emplace(key, Primitive{dnnl::matmul(chosen), a, b, c, bias, chosen.scratchpad_desc()})
      .first->second;
}

void Primitives::multiply(const Product& product, void* workspace) {
  omp_set_num_threads(threads_);
  const Primitive& chosen = primitive(product);
  const auto operand = [&](const memory::desc& description, const void* data) {
    return memory(description, engine_, const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments = {{DNNL_ARG_SRC, operand(chosen.a, product.a.data)},
                                               {DNNL_ARG_WEIGHTS, operand(chosen.b, product.b.data)},
                                               {DNNL_ARG_DST, operand(chosen.c, product.c.data)},
                                               {DNNL_ARG_SCRATCHPAD, operand(chosen.scratchpad, workspace)}};
  if (product.bias) arguments.emplace(DNNL_ARG_BIAS, operand(chosen.bias, product.bias));
  chosen.matmul.execute(stream_, arguments);
  stream_.wait();
}

}  // namespace sluice::kernels
