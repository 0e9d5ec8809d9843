#include "kernels/norm.h"

#include <algorithm>

#include "core/bytes.h"
#include "kernels/simd.h"

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

HWY_INLINE float inverse_deviation(float square_sum, std::size_t width, float epsilon) {
  return 1.0f / std::sqrt(square_sum / static_cast<float>(width) + epsilon);
}

void layernorm_rows(std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma, ConstArray beta,
                    float epsilon, Array y, float* statistics) {
  for (std::size_t row = 0; row < rows; ++row) {
    const ConstArray in = x.at(row * width);
    const Array out = y.at(row * width);
    const float mean =
        sum_in_lanes<float>(width, [=](auto at, auto sum) HWY_ATTR { return hn::Add(sum, load(in, at)); }) /
        static_cast<float>(width);
    const float squares = sum_in_lanes<float>(width, [=](auto at, auto sum) HWY_ATTR {
      const auto centred = hn::Sub(load(in, at), set(mean));
      return mul_add(centred, centred, sum);
    });
    const float inverse = inverse_deviation(squares, width, epsilon);
    for_each_vector(width, [=](auto at) HWY_ATTR {
      const auto normal = hn::Mul(hn::Sub(load(in, at), set(mean)), set(inverse));
      store(mul_add(normal, load(gamma, at), load(beta, at)), out, at);
    });
    statistics[2 * row] = mean;
    statistics[2 * row + 1] = inverse;
  }
}

void rmsnorm_rows(std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma, float epsilon, Array y,
                  float* statistics) {
  for (std::size_t row = 0; row < rows; ++row) {
    const ConstArray in = x.at(row * width);
    const Array out = y.at(row * width);
    const float squares = sum_in_lanes<float>(width, [=](auto at, auto sum) HWY_ATTR {
      const auto value = load(in, at);
      return mul_add(value, value, sum);
    });
    const float inverse = inverse_deviation(squares, width, epsilon);
    for_each_vector(width, [=](auto at) HWY_ATTR {
      store(hn::Mul(hn::Mul(load(in, at), set(inverse)), load(gamma, at)), out, at);
    });
    statistics[row] = inverse;
  }
}

// A row's normalized x (`normal`), and the gradient of the normalized value (`inner`).
template <bool kCentred>
struct NormRow {
  ConstArray x, gamma, dy;
  float mean, inverse;
  template <class At>
  HWY_INLINE F32Vector normal(At at) const {
    const auto value = load(x, at);
    return hn::Mul(kCentred ? hn::Sub(value, set(mean)) : value, set(inverse));
  }
  template <class At>
  HWY_INLINE F32Vector inner(At at) const {
    return hn::Mul(load(dy, at), load(gamma, at));
  }
};

// dx = inverse * (inner - mean(inner) - normal * mean(inner * normal)), without mean(inner) unless centred.
template <bool kCentred>
HWY_INLINE void norm_dx(std::size_t width, const NormRow<kCentred>& row, Array dx) {
  const auto size = static_cast<float>(width);
  float level = 0;
  if (kCentred)
    level =
        sum_in_lanes<float>(width, [=](auto at, auto sum) HWY_ATTR { return hn::Add(sum, row.inner(at)); }) /
        size;
  const float slope =
      sum_in_lanes<float>(
          width, [=](auto at, auto sum) HWY_ATTR { return mul_add(row.inner(at), row.normal(at), sum); }) /
      size;
  for_each_vector(width, [=](auto at) HWY_ATTR {
    const auto inner = row.inner(at);
    const auto centred = kCentred ? hn::Sub(inner, set(level)) : inner;
    store(hn::Mul(mul_add(row.normal(at), set(-slope), centred), set(row.inverse)), dx, at);
  });
}

template <class At>
HWY_INLINE void add_row(bool first, F32Vector value, float* sums, At at) {
  store(first ? value : hn::Add(load(sums, at), value), sums, at);
}

template <bool kCentred>
HWY_INLINE void norm_backward_rows(std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                                   const float* statistics, ConstArray dy, Array dx, float* dgamma,
                                   float* dbeta) {
  for (std::size_t r = 0; r < rows; ++r) {
    const float mean = kCentred ? statistics[2 * r] : 0.0f;
    const float inverse = kCentred ? statistics[2 * r + 1] : statistics[r];
    const NormRow<kCentred> row{x.at(r * width), gamma, dy.at(r * width), mean, inverse};
    for_each_vector(width, [=](auto at) HWY_ATTR {
      const auto down = load(row.dy, at);
      add_row(r == 0, hn::Mul(down, row.normal(at)), dgamma, at);
      if (kCentred) add_row(r == 0, down, dbeta, at);
    });
    norm_dx(width, row, dx.at(r * width));
  }
}

void backward_rows(bool centred, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                   const float* statistics, ConstArray dy, Array dx, float* dgamma, float* dbeta) {
  if (centred)
    norm_backward_rows<true>(rows, width, x, gamma, statistics, dy, dx, dgamma, dbeta);
  else
    norm_backward_rows<false>(rows, width, x, gamma, statistics, dy, dx, dgamma, nullptr);
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(layernorm_rows);
HWY_EXPORT(rmsnorm_rows);
HWY_EXPORT(backward_rows);

namespace {
std::size_t row_grain(std::size_t width) {
  return std::max<std::size_t>(kLoopGrain / 2 / std::max<std::size_t>(width, 1), 1);
}
// A LayerNorm has two statistics for each row, and two sums for each block of rows. An RMSNorm has one, and
// no dbeta.
void norm_backward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                   const float* statistics, ConstArray dy, Array dx, float* dgamma, float* dbeta,
                   bool accumulate, void* workspace) {
  require_float({x, gamma, dy, dx});
  auto* const partials = static_cast<float*>(workspace);
  const bool centred = dbeta != nullptr;
  const std::size_t each = centred ? 2 : 1, blocks = divide_up(rows, kRowBlock);
  threads.parallel_for(rows, kRowBlock, [&](std::size_t begin, std::size_t end) {
    float* const sums = partials + begin / kRowBlock * each * width;
    HWY_DYNAMIC_DISPATCH(backward_rows)
    (centred, end - begin, width, x.at(begin * width), gamma, statistics + each * begin, dy.at(begin * width),
     dx.at(begin * width), sums, sums + width);
  });
  add_row_blocks(threads, blocks, width, each * width, partials, dgamma, accumulate);
  if (centred) add_row_blocks(threads, blocks, width, each * width, partials + width, dbeta, accumulate);
}

}  // namespace

void layernorm_forward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                       ConstArray beta, float epsilon, Array y, float* statistics) {
  require_float({x, gamma, beta, y});
  threads.parallel_for(rows, row_grain(width), [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(layernorm_rows)
    (end - begin, width, x.at(begin * width), gamma, beta, epsilon, y.at(begin * width),
     statistics + 2 * begin);
  });
}

// Returns the bytes of the sums for dgamma and dbeta of all blocks of rows.
std::size_t norm_backward_workspace(std::size_t rows, std::size_t width) {
  return divide_up(rows, kRowBlock) * 2 * width * sizeof(float);
}

void layernorm_backward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                        const float* statistics, ConstArray dy, Array dx, float* dgamma, float* dbeta,
                        bool accumulate, void* workspace) {
  norm_backward(threads, rows, width, x, gamma, statistics, dy, dx, dgamma, dbeta, accumulate, workspace);
}

void rmsnorm_forward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                     float epsilon, Array y, float* statistics) {
  require_float({x, gamma, y});
  threads.parallel_for(rows, row_grain(width), [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(rmsnorm_rows)
    (end - begin, width, x.at(begin * width), gamma, epsilon, y.at(begin * width), statistics + begin);
  });
}

void rmsnorm_backward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                      const float* statistics, ConstArray dy, Array dx, float* dgamma, bool accumulate,
                      void* workspace) {
  norm_backward(threads, rows, width, x, gamma, statistics, dy, dx, dgamma, nullptr, accumulate, workspace);
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
