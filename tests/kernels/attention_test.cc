#include "kernels/attention.h"

#include <hwy/targets.h>

#include "core/error.h"
#include "core/random.h"
#include "float_array.h"
#include "testing.h"

namespace sluice::kernels::attention_test {

constexpr float kOutside = 776.0f;  // fills the gaps between rows; every type can hold it

class Buffer {
 public:
  Buffer() = default;
  Buffer(Dtype type, std::size_t elements)
      : type_(type), elements_(elements), bytes_(elements * size_of(type)) {}
  Array array() { return {bytes_.data(), type_}; }
  Array at(std::size_t element) { return array().at(element); }
  float get(std::size_t i) { return test::value_at(array(), i); }
  void set(std::size_t i, float value) { test::set_value(array(), i, value); }
  void fill(float value) {
    for (std::size_t i = 0; i < elements_; ++i) set(i, value);
  }
  void fill_random(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < elements_; ++i) set(i, normal(random));
  }
  std::size_t size() const { return elements_; }
  const std::vector<std::byte>& bits() const { return bytes_; }

 private:
  Dtype type_ = Dtype::kF32;
  std::size_t elements_ = 0;
  std::vector<std::byte> bytes_;
};

using Matrix = std::vector<double>;  // [rows][columns]

// Computes the reference in f64, with the whole length x length matrix of one head at a time.
struct Reference {
  AttentionShape s;
  Matrix q, k, v, dout;  // [batch][heads][length][width]
  Matrix out, log_sum, dq, dk, dv;

  std::size_t at(std::size_t heads, std::size_t b, std::size_t h, std::size_t t) const {
    return ((b * heads + h) * s.length + t) * s.head_width;
  }

  double dropout_factor(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const {
    if (s.dropout == 0) return 1;
    const std::uint64_t index = s.first_index + ((b * s.heads + h) * s.length + i) * s.length + j;
    const std::uint32_t word = CounterRandom(s.seed, s.stream).block(index / 4)[index % 4];
    return to_unit_interval(word) < 1.0f - s.dropout ? 1.0 / (1.0 - static_cast<double>(s.dropout)) : 0.0;
  }

  double dot(const Matrix& x, std::size_t x_at, const Matrix& y, std::size_t y_at) const {
    double sum = 0;
    for (std::size_t c = 0; c < s.head_width; ++c) sum += x[x_at + c] * y[y_at + c];
    return sum;
  }
  void add(Matrix& x, std::size_t x_at, double factor, const Matrix& y, std::size_t y_at) const {
    for (std::size_t c = 0; c < s.head_width; ++c) x[x_at + c] += factor * y[y_at + c];
  }

  void query(std::size_t b, std::size_t h, std::size_t i) {
    const std::size_t g = h / (s.heads / s.kv_heads), qi = at(s.heads, b, h, i);
    std::vector<double> p(i + 1), dp(i + 1);
    double maximum = -INFINITY, total = 0, delta = 0;
    for (std::size_t j = 0; j <= i; ++j)
      maximum = std::max(maximum, p[j] = s.scale * dot(q, qi, k, at(s.kv_heads, b, g, j)));
    for (double& value : p) total += value = std::exp(value - maximum);
    log_sum[(b * s.heads + h) * s.length + i] = maximum + std::log(total);
    for (std::size_t j = 0; j <= i; ++j) {
      const std::size_t kj = at(s.kv_heads, b, g, j);
      const double factor = dropout_factor(b, h, i, j);
      p[j] /= total;
      dp[j] = factor * dot(dout, qi, v, kj);
      delta += p[j] * dp[j];
      add(out, qi, p[j] * factor, v, kj);
      add(dv, kj, p[j] * factor, dout, qi);
    }
    for (std::size_t j = 0; j <= i; ++j) {
      const std::size_t kj = at(s.kv_heads, b, g, j);
      const double ds = s.scale * p[j] * (dp[j] - delta);
      add(dq, qi, ds, k, kj);
      add(dk, kj, ds, q, qi);
    }
  }

  void clear() {
    out.assign(q.size(), 0);
    dq.assign(q.size(), 0);
    log_sum.assign(s.batch * s.heads * s.length, 0);
    dk.assign(k.size(), 0);
    dv.assign(v.size(), 0);
  }
  void compute(std::size_t first_query = 0) {
    clear();
    for (std::size_t b = 0; b < s.batch; ++b)
      for (std::size_t h = 0; h < s.heads; ++h)
        for (std::size_t i = first_query; i < s.length; ++i) query(b, h, i);
  }
};

struct Case {
  std::size_t batch, length, heads, kv_heads, width;
  float dropout = 0;
  Dtype type = Dtype::kF32;
  std::size_t gap = 0;  // elements between the rows of the array that holds q, k and v
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "batch " << c.batch << " length " << c.length << " heads " << c.heads << "/" << c.kv_heads
             << " width " << c.width << " dropout " << c.dropout << " " << name_of(c.type) << " gap "
             << c.gap;
}

// The arrays of one case: q, k and v are columns of one array [tokens, q + k + v + gap], as after one
// projection.
struct Trial {
  Case c;
  AttentionShape s;
  std::size_t stride, k_at, v_at;
  Buffer qkv, dqkv, out, dout;
  std::vector<float> log_sum;

  explicit Trial(const Case& shape) : c(shape) {
    k_at = c.heads * c.width;
    v_at = k_at + c.kv_heads * c.width;
    stride = v_at + c.kv_heads * c.width + c.gap;
    s.batch = c.batch, s.length = c.length, s.heads = c.heads, s.kv_heads = c.kv_heads,
    s.head_width = c.width;
    s.q_stride = s.k_stride = s.v_stride = stride;
    s.scale = 1.0f / std::sqrt(static_cast<float>(c.width));
    s.dropout = c.dropout, s.seed = 0x123456789abcdefull, s.stream = 0xfedcba987ull,
    s.first_index = (1ull << 34) + 7;
    qkv = Buffer(c.type, c.batch * c.length * stride);
    dqkv = Buffer(c.type, qkv.size());
    out = Buffer(c.type, c.batch * c.length * c.heads * c.width);
    dout = Buffer(c.type, out.size());
    log_sum.assign(c.batch * c.heads * c.length, kOutside);
    qkv.fill_random(11);
    dout.fill_random(12);
    dqkv.fill(kOutside);
    out.fill(kOutside);
  }

  void forward(Threads& threads) {
    Workspace workspace(attention_forward_workspace(s, threads.count()));
    attention_forward(threads, s, qkv.at(0), qkv.at(k_at), qkv.at(v_at), out.array(), log_sum.data(),
                      workspace.data());
    workspace.expect_within();
  }
  void backward(Threads& threads) {
    Workspace workspace(attention_backward_workspace(s, threads.count()));
    attention_backward(threads, s, qkv.at(0), qkv.at(k_at), qkv.at(v_at), out.array(), log_sum.data(),
                       dout.array(), dqkv.at(0), dqkv.at(k_at), dqkv.at(v_at), workspace.data());
    workspace.expect_within();
  }

  Reference reference(std::size_t first_query = 0) {
    Reference r;
    r.s = s;
    r.q = gather(qkv, 0, c.heads);
    r.k = gather(qkv, k_at, c.kv_heads);
    r.v = gather(qkv, v_at, c.kv_heads);
    r.dout = gather_dense(dout);
    r.compute(first_query);
    return r;
  }

  // Returns the columns from `column` on as [batch][heads][length][width].
  Matrix gather(Buffer& from, std::size_t column, std::size_t heads, std::size_t row_stride = 0) {
    if (row_stride == 0) row_stride = stride;
    Matrix to;
    for (std::size_t b = 0; b < c.batch; ++b)
      for (std::size_t h = 0; h < heads; ++h)
        for (std::size_t t = 0; t < c.length; ++t)
          for (std::size_t x = 0; x < c.width; ++x)
            to.push_back(from.get((b * c.length + t) * row_stride + column + h * c.width + x));
    return to;
  }
  Matrix gather_dense(Buffer& from) { return gather(from, 0, c.heads, c.heads * c.width); }

  void expect_gap_untouched() {
    for (std::size_t t = 0; t < c.batch * c.length; ++t)
      for (std::size_t x = stride - c.gap; x < stride; ++x)
        ASSERT_EQ(dqkv.get(t * stride + x), kOutside) << c << ": wrote between the rows";
  }

  // The memory is filled with NaN, and has a mark behind its end.
  class Workspace {
   public:
    explicit Workspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + 128, std::byte{0xff}) {
      while (reinterpret_cast<std::uintptr_t>(memory_.data() + offset_) % 64 != 0) ++offset_;
    }
    void* data() { return memory_.data() + offset_; }
    void expect_within() {
      for (std::size_t i = offset_ + bytes_; i < memory_.size(); ++i)
        ASSERT_EQ(memory_[i], std::byte{0xff}) << "wrote behind the workspace";
    }

   private:
    std::size_t bytes_, offset_ = 0;
    std::vector<std::byte> memory_;
  };
};

// Returns the largest difference, relative to the largest element.
double distance(const Matrix& found, const Matrix& expected) {
  double worst = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(found[i])) return INFINITY;
    worst = std::max(worst, std::abs(found[i] - expected[i]));
    size = std::max(size, std::abs(expected[i]));
  }
  return size == 0 ? worst : worst / size;
}

void expect_right(const Case& c) {
  SCOPED_TRACE(testing::PrintToString(c));
  Threads threads(2);
  Trial trial(c);
  const Reference expected = trial.reference();
  trial.forward(threads);
  trial.backward(threads);
  // For narrow types it is the rounding of the result, and in backward that of `out`, too.
  const bool narrow = c.type != Dtype::kF32;
  const double step = c.type == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
  EXPECT_LT(distance(trial.gather_dense(trial.out), expected.out), narrow ? step : 2e-6);
  EXPECT_LT(distance(Matrix(trial.log_sum.begin(), trial.log_sum.end()), expected.log_sum), 1e-6);
  EXPECT_LT(distance(trial.gather(trial.dqkv, 0, c.heads), expected.dq), narrow ? 4 * step : 4e-6);
  EXPECT_LT(distance(trial.gather(trial.dqkv, trial.k_at, c.kv_heads), expected.dk),
            narrow ? 4 * step : 4e-6);
  EXPECT_LT(distance(trial.gather(trial.dqkv, trial.v_at, c.kv_heads), expected.dv),
            narrow ? 2 * step : 4e-6);
  trial.expect_gap_untouched();
}

TEST(AttentionTest, AgreesWithF64AtEveryLength) {
  for (const std::size_t length : {1, 2, 7, 15, 16, 17, 33, 63, 64, 65, 100, 128, 130, 200})
    expect_right({2, length, 2, 2, 16});
}

TEST(AttentionTest, AgreesWithF64AtEveryHeadWidth) {
  for (const std::size_t width : {1, 3, 8, 20, 24, 40, 64, 80, 96, 128, 256, 264})
    expect_right({1, 70, 2, 1, width});
}

TEST(AttentionTest, GroupsOfQueryHeadsShareKeys) {
  expect_right({2, 90, 6, 2, 32});
  expect_right({1, 90, 8, 1, 32, 0.0f, Dtype::kF32, 24});
}

TEST(AttentionTest, NarrowTypesAndGaps) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16}) {
    for (const std::size_t length : {1, 50, 150})
      for (const std::size_t width : {8, 20, 64}) {
        expect_right({2, length, 4, 2, width, 0.0f, type});
        expect_right({2, length, 4, 2, width, 0.0f, type, 5});
      }
    expect_right({2, 100, 3, 3, 24, 0.25f, type, 3});
  }
}

TEST(AttentionTest, DropoutUsesTheSameWordsForwardAndBackward) {
  for (const std::size_t length : {1, 2, 5, 64, 67, 130}) expect_right({2, length, 4, 2, 16, 0.3f});
  expect_right({1, 64, 1, 1, 8, 0.999f});
}

// Scores are several hundred: without the running maximum the exponentials would overflow.
TEST(AttentionTest, LargeScoresStayFinite) {
  Threads threads(2);
  Trial trial({1, 150, 2, 2, 16});
  for (std::size_t i = 0; i < trial.qkv.size(); ++i) trial.qkv.set(i, trial.qkv.get(i) * 20);
  const Reference expected = trial.reference();
  trial.forward(threads);
  trial.backward(threads);
  EXPECT_LT(distance(trial.gather_dense(trial.out), expected.out), 1e-4);
  EXPECT_LT(distance(Matrix(trial.log_sum.begin(), trial.log_sum.end()), expected.log_sum), 1e-6);
  EXPECT_LT(distance(trial.gather(trial.dqkv, 0, 2), expected.dq), 1e-3);
}

TEST(AttentionTest, NanReachesLaterTokensOnly) {
  Threads threads(1);
  Trial trial({1, 100, 1, 1, 16});
  trial.qkv.set(70 * trial.stride + trial.k_at, NAN);
  trial.forward(threads);
  for (std::size_t t = 0; t < 100; ++t)
    EXPECT_EQ(std::isnan(trial.out.get(t * 16)), t >= 70) << "token " << t;
}

// Returns all that forward and backward write, for comparison to the bit.
std::vector<std::vector<std::byte>> results(const Case& c, int thread_count) {
  Threads threads(thread_count);
  Trial trial(c);
  trial.forward(threads);
  trial.backward(threads);
  const auto* log_sums = reinterpret_cast<const std::byte*>(trial.log_sum.data());
  return {trial.out.bits(), {log_sums, log_sums + trial.log_sum.size() * sizeof(float)}, trial.dqkv.bits()};
}

constexpr Case kBitCases[] = {{2, 150, 4, 2, 40, 0.2f},
                              {3, 97, 3, 3, 64, 0.0f, Dtype::kBf16, 8},
                              {1, 257, 2, 1, 20},
                              {1, 97, 3, 3, 64, 0.2f, Dtype::kF16, 8}};

TEST(AttentionTest, ThreadsDoNotChangeTheBits) {
  for (const Case& c : kBitCases)
    for (const int count : {2, 3})
      EXPECT_EQ(results(c, count), results(c, 1)) << c << ", " << count << " threads";
}

std::vector<std::byte> decoded(const Case& c, std::size_t capacity);

class TargetTest : public testing::TestWithParam<std::int64_t> {
 protected:
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(TargetTest, VectorWidthDoesNotChangeTheBits) {
  hwy::SetSupportedTargetsForTest(0);
  if (GetParam() != HWY_SCALAR && (hwy::SupportedTargets() & GetParam()) == 0)
    GTEST_SKIP() << "this CPU has no " << hwy::TargetName(GetParam());
  for (const Case& c : kBitCases) {
    hwy::SetSupportedTargetsForTest(0);
    const auto expected = results(c, 2);
    const auto expected_decoded = decoded(c, c.length + 3);
    hwy::SetSupportedTargetsForTest(GetParam());
    EXPECT_EQ(results(c, 2), expected) << c;
    EXPECT_EQ(decoded(c, c.length + 3), expected_decoded) << c;
  }
}
INSTANTIATE_TEST_SUITE_P(Targets, TargetTest, testing::Values(HWY_SCALAR, HWY_AVX2, HWY_AVX3),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

// Decodes the last token of a sequence: q is that token's row, and k and v are a cache with room for
// `capacity` tokens.
struct Decoding {
  Case c;
  Trial trial;
  Buffer keys, values, queries, out;
  Decoding(const Case& shape, std::size_t capacity) : c(shape), trial(shape) {
    trial.s.dropout = 0;
    const std::size_t width = c.kv_heads * c.width, row = c.heads * c.width;
    keys = Buffer(c.type, c.batch * capacity * width);
    values = Buffer(c.type, c.batch * capacity * width);
    keys.fill(NAN);
    values.fill(NAN);
    queries = Buffer(c.type, c.batch * row);
    out = Buffer(c.type, c.batch * row);
    for (std::size_t b = 0; b < c.batch; ++b) {
      for (std::size_t t = 0; t < c.length; ++t)
        for (std::size_t x = 0; x < width; ++x) {
          keys.set((b * capacity + t) * width + x,
                   trial.qkv.get((b * c.length + t) * trial.stride + trial.k_at + x));
          values.set((b * capacity + t) * width + x,
                     trial.qkv.get((b * c.length + t) * trial.stride + trial.v_at + x));
        }
      for (std::size_t x = 0; x < row; ++x)
        queries.set(b * row + x, trial.qkv.get((b * c.length + c.length - 1) * trial.stride + x));
    }
    AttentionShape s = trial.s;
    s.q_stride = row;
    s.k_stride = s.v_stride = width;
    Threads threads(2);
    attention_decode(threads, s, capacity, queries.array(), keys.array(), values.array(), out.array());
  }
};

std::vector<std::byte> decoded(const Case& c, std::size_t capacity) {
  return Decoding(c, capacity).out.bits();
}

TEST(AttentionTest, DecodeAgreesWithTheLastTokenOfF64) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t length : {1, 3, 16, 64, 65, 200})
      for (const auto& [heads, kv_heads, width] :
           {std::array<std::size_t, 3>{4, 4, 64}, {6, 2, 20}, {8, 1, 128}}) {
        const Case c{2, length, heads, kv_heads, width, 0.0f, type};
        Decoding decoding(c, length + 5);
        const Reference expected = decoding.trial.reference(length - 1);
        Matrix found, last;
        for (std::size_t b = 0; b < c.batch; ++b)
          for (std::size_t h = 0; h < heads; ++h)
            for (std::size_t x = 0; x < width; ++x) {
              found.push_back(decoding.out.get((b * heads + h) * width + x));
              last.push_back(expected.out[expected.at(heads, b, h, length - 1) + x]);
            }
        EXPECT_LT(distance(found, last), type == Dtype::kF32 ? 2e-6 : 0x1p-8) << c;
      }
}

TEST(AttentionTest, RefusesImpossibleShapes) {
  Threads threads(1);
  const auto message = [&](auto change) -> std::string {
    Trial trial({1, 4, 4, 2, 8});
    change(trial);
    try {
      trial.forward(threads);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message([](Trial& t) { t.s.kv_heads = 3; }), testing::HasSubstr("multiple"));
  EXPECT_THAT(message([](Trial& t) { t.s.dropout = 1; }), testing::HasSubstr("below 1"));
  EXPECT_THAT(message([](Trial& t) { t.s.dropout = NAN; }), testing::HasSubstr("below 1"));
  EXPECT_EQ(message([](Trial& t) { t.s.batch = 0; }), "no error");
  EXPECT_EQ(message([](Trial& t) { t.s.length = 0; }), "no error");
  Trial trial({1, 4, 1, 1, 8});
  EXPECT_THROW(attention_decode(threads, trial.s, 3, trial.qkv.array(), trial.qkv.array(), trial.qkv.array(),
                                trial.out.array()),
               Error);
}

}  // namespace sluice::kernels::attention_test
