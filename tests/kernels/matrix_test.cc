#include "kernels/matrix.h"

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "float_array.h"
#include "rounding.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::kernels::matrix_test {

constexpr float kOutside = 776.0f;  // fills the gaps between C's rows, which no product may touch

// Elements of one type at a chosen misalignment (in elements), with values that bf16 and f16 can hold.
class Buffer {
 public:
  Buffer(Dtype type, std::size_t elements, std::size_t misalignment = 0)
      : type_(type), elements_(elements), first_(misalignment), bytes_((elements + misalignment + 64) * 4) {
    while ((reinterpret_cast<std::uintptr_t>(bytes_.data()) + offset_) % 64 != 0) ++offset_;
  }
  Array array() { return {bytes_.data() + offset_ + first_ * size_of(type_), type_}; }
  float get(std::size_t i) { return test::value_at(array(), i); }
  void set(std::size_t i, float value) { test::set_value(array(), i, value); }
  void fill(float value) {
    for (std::size_t i = 0; i < elements_; ++i) set(i, value);
  }
  // Values that are drawn once and repeat, since drawing each would take longer than the products.
  void fill_random(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> drawn(std::min<std::size_t>(elements_, 1009));
    for (float& value : drawn) value = to_f32(to_bf16(normal(random)));
    for (std::size_t i = 0; i < elements_; ++i) set(i, drawn[i % drawn.size()]);
  }
  std::vector<std::byte> bits() {
    const auto* begin = static_cast<const std::byte*>(array().data);
    return {begin, begin + elements_ * size_of(type_)};
  }

 private:
  Dtype type_;
  std::size_t elements_, first_, offset_ = 0;
  std::vector<std::byte> bytes_;
};

struct Case {
  std::size_t m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false, bias = false;
  Dtype type = Dtype::kF32, c_type = Dtype::kF32;
  std::size_t pad = 0;  // elements between the rows
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.m << "x" << c.n << "x" << c.k << (c.transpose_a ? " A'" : " A")
             << (c.transpose_b ? "B'" : "B") << (c.accumulate ? " accumulate" : "") << (c.bias ? " bias" : "")
             << " " << name_of(c.type) << " into " << name_of(c.c_type) << " pad " << c.pad;
}

// The operands of one case, and its result.
struct Trial {
  Case shape;
  std::size_t lda, ldb, ldc;
  Buffer a, b, c, before, bias;

  explicit Trial(const Case& s, std::size_t misalignment = 0)
      : shape(s),
        lda((s.transpose_a ? s.m : s.k) + s.pad),
        ldb((s.transpose_b ? s.k : s.n) + s.pad),
        ldc(s.n + s.pad),
        a(s.type, (s.transpose_a ? s.k : s.m) * lda, misalignment),
        b(s.type, (s.transpose_b ? s.n : s.k) * ldb, misalignment),
        c(s.c_type, s.m * ldc, misalignment),
        before(s.c_type, s.m * ldc),
        bias(s.type, s.n, misalignment) {
    a.fill_random(1);
    b.fill_random(2);
    bias.fill_random(3);
    before.fill_random(4);
    for (std::size_t i = 0; i < s.m * ldc; ++i) {
      if (i % ldc >= s.n) before.set(i, kOutside);
      c.set(i, before.get(i));
    }
  }

  Product product() {
    Product p{.m = shape.m,
              .n = shape.n,
              .k = shape.k,
              .a = a.array(),
              .b = b.array(),
              .c = c.array(),
              .transpose_a = shape.transpose_a,
              .transpose_b = shape.transpose_b,
              .accumulate = shape.accumulate};
    if (shape.pad) p.lda = lda, p.ldb = ldb, p.ldc = ldc;
    if (shape.bias) p.bias = bias.array().data;
    return p;
  }

  void multiply_with(MatrixLibrary& library, Threads& threads) {
    const Product p = product();
    const std::size_t bytes = product_workspace(p, library);
    std::vector<std::byte> memory(bytes + 128, std::byte{0xff});  // NaN shows where it is read before written
    auto* workspace = memory.data();
    while (reinterpret_cast<std::uintptr_t>(workspace) % 64 != 0) ++workspace;
    workspace[bytes] = std::byte{0x5a};
    multiply(library, threads, p, workspace);
    EXPECT_EQ(workspace[bytes], std::byte{0x5a}) << "wrote behind the workspace";
  }

  double a_at(std::size_t i, std::size_t l) { return a.get(shape.transpose_a ? l * lda + i : i * lda + l); }
  double b_at(std::size_t l, std::size_t j) { return b.get(shape.transpose_b ? j * ldb + l : l * ldb + j); }

  void expect_element(std::size_t i, std::size_t j) {
    double sum = shape.accumulate ? before.get(i * ldc + j) : shape.bias ? bias.get(j) : 0.0;
    double size = std::abs(sum);
    for (std::size_t l = 0; l < shape.k; ++l) {
      sum += a_at(i, l) * b_at(l, j);
      size += std::abs(a_at(i, l) * b_at(l, j));
    }
    double tolerance = size * test::of_sum(shape.k + 1);
    if (shape.c_type != Dtype::kF32) tolerance += std::abs(sum) * test::unit_roundoff(shape.c_type);
    ASSERT_NEAR(c.get(i * ldc + j), sum, tolerance) << shape << " at " << i << ", " << j;
  }

  void expect_right() {
    const std::size_t row_step = std::max<std::size_t>(1, shape.m / 32);
    const std::size_t column_step = std::max<std::size_t>(1, shape.n / 32);
    for (std::size_t i = 0; i < shape.m; i += row_step)
      for (std::size_t j = 0; j < shape.n; j += column_step) expect_element(i, j);
    for (std::size_t i = 0; i < shape.m; ++i) expect_element(i, shape.n - 1);
    for (std::size_t i = 0; i < shape.m * ldc; ++i) {
      if (i % ldc < shape.n) continue;
      ASSERT_EQ(c.get(i), before.get(i)) << shape << ": wrote between the rows of C";
    }
  }
};

class MatrixTest : public testing::Test {
 protected:
  void expect_right(const Case& shape) {
    Trial trial(shape);
    trial.multiply_with(*library_, threads_);
    trial.expect_right();
  }
  std::unique_ptr<MatrixLibrary> library_ = load_matrix_library(2);
  Threads threads_{2};
};

TEST_F(MatrixTest, NamesItself) {
  EXPECT_THAT(library_->name(), testing::StartsWith("oneDNN "));
  EXPECT_EQ(library_->threads(), 2);
}

Product sized(std::size_t m, std::size_t n, std::size_t k, bool transpose_b = false) {
  Product product;
  product.m = m, product.n = n, product.k = k;
  product.transpose_b = transpose_b;
  return product;
}

// The expected values follow from the rule in kernels/README.md.
TEST_F(MatrixTest, WhichProductsGoToAPrimitiveIsARuleOfShapesAndInstructions) {
  const bool wide = library_->name().find("avx512") != std::string::npos;
  const auto goes = [&](Product p) { return library_->has_primitive(p); };
  EXPECT_EQ(goes(sized(256, 2048, 2048, true)), wide);
  EXPECT_EQ(goes(sized(512, 50257, 768, true)), wide);
  EXPECT_EQ(goes(sized(1024, 768, 3072, true)), wide);
  EXPECT_EQ(load_matrix_library(1)->has_primitive(sized(256, 2048, 2048, true)), wide);
  EXPECT_FALSE(load_matrix_library(1)->has_primitive(sized(512, 2048, 2048, true)));
  for (const Product& p : {sized(256, 2048, 2048), sized(1024, 2048, 2048, true), sized(1, 2048, 2048, true)})
    EXPECT_FALSE(goes(p)) << p.m << " x " << p.n << " x " << p.k;
  Product of_columns = sized(256, 2048, 2048, true);
  of_columns.transpose_a = true;
  EXPECT_FALSE(goes(of_columns));
}

// Compares what the process takes while it computes products, without the operands, with the survey.
TEST_F(MatrixTest, TakesNoMoreForItselfThanTheSurveySays) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps what is freed, so that what is resident grows";
#endif
  const std::vector<Product> products = {
      sized(512, 960, 320), sized(512, 320, 1280),      sized(320, 1280, 512),      sized(64, 2048, 320),
      sized(2048, 320, 64), sized(320, 960, 512, true), sized(128, 320, 1280, true)};
  std::vector<float> a(2048 * 1280, 0.5f), b(2048 * 1280, 0.25f), c(2048 * 1280, 0.0f);
  ProductSurvey survey(*library_);
  std::size_t most = 0;
  for (const Product& product : products) most = std::max(most, survey.workspace(product));
  std::vector<std::byte> workspace(most);
  const auto compute = [&](Product product) {
    product.a = {a.data(), Dtype::kF32}, product.b = {b.data(), Dtype::kF32};
    product.c = {c.data(), Dtype::kF32};
    multiply(*library_, threads_, product, workspace.data());
  };
  compute(sized(256, 256, 256));  // brings the library's code into memory
  const std::size_t before = allocator::resident_bytes();
  std::vector<std::unique_ptr<char[]>> others;  // small objects between the products, as in every program
  for (std::size_t round = 0; round < 12; ++round) {
    for (const Product& product : products) {
      others.push_back(std::make_unique<char[]>(5 * round));
      compute(product);
    }
    EXPECT_LE(allocator::resident_bytes(), before + survey.hidden_bytes());
  }
  EXPECT_LT(survey.hidden_bytes(), 12 * kMiB);
}

TEST_F(MatrixTest, EveryTransposeStrideTypeAndAddend) {
  constexpr std::pair<Dtype, Dtype> kTypes[] = {{Dtype::kF32, Dtype::kF32},
                                                {Dtype::kBf16, Dtype::kF32},
                                                {Dtype::kBf16, Dtype::kBf16},
                                                {Dtype::kF16, Dtype::kF32},
                                                {Dtype::kF16, Dtype::kF16}};
  for (const auto& [type, c_type] : kTypes)
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true})
        for (const std::size_t pad : {0, 5})
          for (const int addend : {0, 1, 2})
            expect_right({33, 50, 70, transpose_a, transpose_b, addend == 1, addend == 2, type, c_type, pad});
}

TEST_F(MatrixTest, OddAndSmallShapes) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const auto& [m, n, k] :
         {std::array<std::size_t, 3>{1, 1, 1}, {1, 257, 64}, {129, 1, 31}, {3, 17, 1}, {96, 96, 96}})
      for (const bool transposed : {false, true})
        expect_right({m, n, k, transposed, !transposed, false, true, type, type});
}

// B is wider than one slice, and the last slice is narrow.
TEST_F(MatrixTest, WidensInSlices) {
  const std::size_t k = 4096, n = kWidenedSlice / k + 40;
  for (const bool transposed : {false, true}) {
    expect_right({3, n, k, transposed, transposed, false, true, Dtype::kBf16, Dtype::kBf16});
    expect_right({3, n, k, transposed, transposed, true, false, Dtype::kF16, Dtype::kF32, 3});
  }
}

TEST_F(MatrixTest, NarrowSliceIsBoundedByTheRowsOfC) {
  Product p;
  p.m = 4096, p.n = 1 << 20, p.k = 8;
  p.a.type = p.b.type = p.c.type = Dtype::kF16;
  EXPECT_LE(product_workspace(p, *library_), (p.m * p.k + 2 * kWidenedSlice) * sizeof(float));
  p.a.type = p.b.type = p.c.type = Dtype::kF32;
  EXPECT_EQ(product_workspace(p, *library_), 0u);
}

TEST_F(MatrixTest, RepeatsItsBitsAtAnyAlignmentAndAfterAnything) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const auto& [m, n, k] : {std::array<std::size_t, 3>{128, 200, 96},
                                  {64, 48, 2000},
                                  {1, 300, 64},
                                  {37, 41, 43},
                                  {600, 130, 530}}) {
      const Case shape{m, n, k, false, true, false, true, type, type};
      Trial first(shape);
      first.multiply_with(*library_, threads_);
      expect_right({7, 1000, 300, true, false, false, false, type, type});
      for (const std::size_t misalignment : {0, 1, 3, 16, 29}) {
        Trial again(shape, misalignment);
        again.multiply_with(*library_, threads_);
        EXPECT_EQ(first.c.bits(), again.c.bits())
            << shape << ", misaligned by " << misalignment << " elements";
      }
    }
}

// A plan asks for the workspace before it knows whether a product accumulates or has a bias.
TEST_F(MatrixTest, AWorkspaceServesEveryAddend) {
  const bool kinds[] = {false, true};
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const bool transpose_b : kinds) {
      Product p = sized(96, 200, 1000, transpose_b);
      p.a.type = p.b.type = p.c.type = type;
      const std::size_t stated = product_workspace(p, *library_);
      p.accumulate = true;
      EXPECT_EQ(product_workspace(p, *library_), stated);
    }
}

TEST_F(MatrixTest, RefusesWhatIsNotAProduct) {
  Trial trial({4, 5, 6});
  const auto message = [&](const Product& p) {
    return message_of([&] { multiply(*library_, threads_, p, nullptr); });
  };
  Product types = trial.product();
  types.b.type = Dtype::kBf16;
  EXPECT_THAT(message(types), testing::HasSubstr("f32 and bf16"));
  Product both = trial.product();
  both.bias = trial.bias.array().data;
  both.accumulate = true;
  EXPECT_THAT(message(both), testing::HasSubstr("bias"));
  Product overlap = trial.product();
  overlap.ldc = 4;
  EXPECT_THAT(message(overlap), testing::HasSubstr("ldc 4"));
  Product empty = trial.product();
  empty.k = 0;
  EXPECT_THAT(message(empty), testing::HasSubstr("k must be at least 1"));
  empty.n = empty.k = 0;
  EXPECT_THAT(message(empty), testing::HasSubstr("k must be at least 1"));
}

TEST(MatrixPluginTest, OtherThreadCountsAreRight) {
  for (const int count : {1, 3}) {
    const auto library = load_matrix_library(count);
    Threads threads(count);
    Trial trial({65, 130, 257});
    trial.multiply_with(*library, threads);
    trial.expect_right();
  }
  EXPECT_THROW(load_matrix_library(0), Error);
}

}  // namespace sluice::kernels::matrix_test
