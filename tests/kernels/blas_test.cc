#include <gtest/gtest.h>

#include <vector>

#include "kernels/harness.h"
#include "kernels/matrix.h"
#include "thrown.h"

// A caller's BLAS gets what it takes for the product that was asked for.
namespace sluice::kernels {
namespace {
using namespace sluice::test;

// As BLAS has it: op(A) is m x k, op(B) k x n, all by columns.
void plain_sgemm(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
                 const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                 const float* beta, float* c, const int* ldc) {
  for (int i = 0; i < *m; ++i)
    for (int j = 0; j < *n; ++j) {
      float sum = 0;
      for (int x = 0; x < *k; ++x)
        sum += (*transpose_a == 'T' ? a[x + i * *lda] : a[i + x * *lda]) *
               (*transpose_b == 'T' ? b[j + x * *ldb] : b[x + j * *ldb]);
      c[i + j * *ldc] = *alpha * sum + (*beta == 0 ? 0 : *beta * c[i + j * *ldc]);
    }
}

TEST(BlasProducts, AreThoseOfTheMatrixLibrary) {
  const auto blas = make_blas_products(plain_sgemm);
  const auto library = load_matrix_library(1);
  for (const bool transpose_a : {false, true})
    for (const bool transpose_b : {false, true})
      for (const bool accumulate : {false, true})
        for (const std::size_t pad : {0, 3}) {
          Product p;
          p.m = 5, p.n = 7, p.k = 9;
          p.transpose_a = transpose_a, p.transpose_b = transpose_b, p.accumulate = accumulate;
          const std::size_t lda = (transpose_a ? p.m : p.k) + pad, ldb = (transpose_b ? p.k : p.n) + pad;
          const TestArray a(Dtype::kF32, random_values(lda * (transpose_a ? p.k : p.m), 1));
          const TestArray b(Dtype::kF32, random_values(ldb * (transpose_b ? p.n : p.k), 2));
          if (pad > 0) p.lda = lda, p.ldb = ldb, p.ldc = p.n + pad;
          p.a = a, p.b = b;
          TestArray found(Dtype::kF32, random_values((p.n + pad) * p.m, 3)), expected = found;
          p.c = found;
          blas->multiply_f32(p);
          p.c = expected;
          library->multiply_f32(p);
          expect_close(
              found, [&](std::size_t i) { return expected[i]; }, 1e-5, 1e-5);
        }
}

TEST(BlasProducts, RefuseWhatItsIntegersCannotSay) {
  const auto blas = make_blas_products(plain_sgemm);
  Product p;
  p.m = std::size_t{1} << 31, p.n = p.k = 1;
  expect_error(ErrorCode::kInvalidArgument, {"32 bits", "2147483648"}, [&] { blas->multiply_f32(p); });
}

}  // namespace
}  // namespace sluice::kernels
