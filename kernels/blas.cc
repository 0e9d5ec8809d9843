#include <climits>

#include "core/error.h"
#include "kernels/matrix.h"

namespace sluice::kernels {
namespace {

int narrow(std::size_t size, const Product& p) {
  if (size > INT_MAX)
    fail(
        ErrorCode::kInvalidArgument,
        "the product [{}, {}] x [{}, {}] is too large for a BLAS with 32-bit integers; use one of fewer rows "
        "and columns",
        p.m, p.k, p.k, p.n);
  return static_cast<int>(size);
}

class BlasProducts final : public F32Products {
 public:
  explicit BlasProducts(Sgemm sgemm) : sgemm_(sgemm) {}

  // A BLAS stores matrices by columns and so sees these transposed: it computes C' = B' A'.
  void multiply_f32(const Product& product) override {
    const Product p = dense(product);
    const float one = 1, beta = p.accumulate ? 1.0f : 0.0f;
    const int m = narrow(p.m, p), n = narrow(p.n, p), k = narrow(p.k, p);
    const int lda = narrow(p.lda, p), ldb = narrow(p.ldb, p), ldc = narrow(p.ldc, p);
    sgemm_(p.transpose_b ? "T" : "N", p.transpose_a ? "T" : "N", &n, &m, &k, &one, p.b.f32(), &ldb, p.a.f32(),
           &lda, &beta, p.c.f32(), &ldc);
  }
  std::size_t hidden_bytes(const Product&) const override { return 0; }

 private:
  Sgemm sgemm_;
};

}  // namespace

std::unique_ptr<F32Products> make_blas_products(Sgemm sgemm) { return std::make_unique<BlasProducts>(sgemm); }

}  // namespace sluice::kernels
