#include "kernels/harness.h"
#include "kernels/matrix.h"
#include "rounding.h"
#include "testing.h"
#include "tests/plain_sgemm.h"
#include "thrown.h"

// A caller's BLAS must get arguments that mean the product that was asked for.
namespace sluice::kernels::blas_test {
using namespace sluice::test;

TEST(BlasProducts, AgreeWithTheMatrixLibrary) {
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
          // The sum has up to nine products and an addend, none of which is larger than this.
          constexpr double kLargest = 5 * 5;
          expect_close(
              found, [&](std::size_t i) { return expected[i]; }, 0,
              2 * of_sum(p.k + 1) * (p.k + 1) * kLargest);
        }
}

TEST(BlasProducts, RefuseSizesThatItsIntegersCannotHold) {
  const auto blas = make_blas_products(plain_sgemm);
  Product p;
  p.m = std::size_t{1} << 31, p.n = p.k = 1;
  expect_error(ErrorCode::kInvalidArgument, {"32-bit", "2147483648"}, [&] { blas->multiply_f32(p); });
}

}  // namespace sluice::kernels::blas_test
