#pragma once

namespace sluice::test {

// A BLAS' sgemm in plain loops: op(A) is m x k, op(B) is k x n, and all are stored by columns.
inline void plain_sgemm(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                        const int* k, const float* alpha, const float* a, const int* lda, const float* b,
                        const int* ldb, const float* beta, float* c, const int* ldc) {
  for (int i = 0; i < *m; ++i)
    for (int j = 0; j < *n; ++j) {
      float sum = 0;
      for (int x = 0; x < *k; ++x)
        sum += (*transpose_a == 'T' ? a[x + i * *lda] : a[i + x * *lda]) *
               (*transpose_b == 'T' ? b[j + x * *ldb] : b[x + j * *ldb]);
      c[i + j * *ldc] = *alpha * sum + (*beta == 0 ? 0 : *beta * c[i + j * *ldc]);
    }
}

}  // namespace sluice::test
