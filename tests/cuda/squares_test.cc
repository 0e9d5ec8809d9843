#include "allocator/device_memory.h"
#include "comm/sums.h"
#include "core/bytes.h"
#include "cuda/kernel_test.h"
#include "kernels/device_reduce.h"
#include "kernels/device_sum.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"
#include "thrown.h"

// Gradients that are added on a GPU, and the sums of their squares, have the bits of those on the CPU.
namespace sluice::kernels::squares_test {

// Values over many powers of ten, so that sums in another order have other bits; some are subnormal or -0.
std::vector<std::byte> make_values(std::size_t count, Dtype type, std::uint64_t seed) {
  std::mt19937_64 words(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * size_of(type));
  for (std::size_t i = 0; i < count; ++i) {
    const float number = normal(words) * std::pow(10.0f, normal(words));
    const float value = i % 61 == 0 ? 0x1p-140f : i % 67 == 1 ? -0.0f : number;
    put(bytes, i, type, value);
  }
  return bytes;
}

// The result of an addition of arrays on the grid of a parameter, from its element `first` on.
struct Sums {
  std::vector<float> to;
  SquareSum squares;
};

class SquaresTest : public KernelTest {
 protected:
  struct Addition {
    std::vector<std::byte> from;
    Dtype type = Dtype::kF32;
    bool accumulate = false;
    float factor = 1;
    std::size_t first = 0;
    std::size_t shift = 0, to_shift = 0;  // by which arrays begin beyond multiples of 256 bytes

    std::size_t count() const { return from.size() / size_of(type); }
    // Of the sum before: where nothing is accumulated, it must not be read.
    std::vector<float> before() const {
      if (!accumulate) return std::vector<float>(count(), std::numeric_limits<float>::quiet_NaN());
      const std::vector<std::byte> values = make_values(count(), Dtype::kF32, 77);
      std::vector<float> floats(count());
      std::memcpy(floats.data(), values.data(), values.size());
      return floats;
    }
  };

  Sums on_cpu(const Addition& addition) {
    Sums sums{addition.before(), {}};
    if (addition.factor != 1) scale(threads_, sums.to.size(), addition.factor, {sums.to.data(), Dtype::kF32});
    sums.squares =
        store_summing_squares(threads_, addition.first, sums.to.size(), {addition.from.data(), addition.type},
                              addition.accumulate, sums.to.data());
    return sums;
  }
  Sums on_gpu(const Addition& a) {
    const std::size_t n = a.count(), blocks = divide_up(n, kGridBlock);
    Memory memory(*device_, a.from.size() + 4 * n + 8 * blocks);
    std::byte* const from = memory.take(a.from.size(), a.shift);
    std::ranges::copy(a.from, from);
    auto* const to = reinterpret_cast<float*>(memory.take(4 * n, a.to_shift));
    std::ranges::copy(a.before(), to);
    auto* const leaves = reinterpret_cast<double*>(memory.take(8 * blocks, 0));
    memory.copy_in();
    DeviceSum(*device_).add(memory.stream(), n, {memory.on_gpu(from), a.type}, a.accumulate, a.factor,
                            {memory.on_gpu(to), Dtype::kF32}, memory.on_gpu(leaves));
    memory.copy_out();
    Sums sums{{to, to + n}, {}};
    sums.squares = added_up(a.first, {leaves, leaves + blocks});
    return sums;
  }
  // Leaves of a parameter's tree, which the GPU puts together.
  SquareSum added_up(std::size_t first, const std::vector<double>& leaves) {
    const auto levels = node_levels(first / kGridBlock, leaves.size(), DeviceSquares::kMostLevel);
    Memory memory(*device_, 8 * leaves.size() + 24 * levels.size());
    auto* const nodes = reinterpret_cast<SumNode*>(memory.take(levels.size() * sizeof(SumNode), 0));
    auto* const from = reinterpret_cast<double*>(memory.take(8 * leaves.size(), 0));
    auto* const to = reinterpret_cast<double*>(memory.take(8 * levels.size(), 0));
    std::ranges::copy(leaves, from);
    std::size_t leaf = 0;
    for (std::size_t i = 0; i < levels.size(); leaf += std::size_t{1} << levels[i++])
      nodes[i] = {leaf, levels[i]};
    memory.copy_in();
    DeviceSquares(*device_).add_up(memory.stream(), levels.size(), memory.on_gpu(nodes), leaves.size(),
                                   memory.on_gpu(from), memory.on_gpu(to));
    memory.copy_out();
    std::vector<PartialSum::Node> found;
    for (std::size_t i = 0; i < levels.size(); ++i) found.push_back({to[i], levels[i]});
    return square_sum(first, found);
  }
  void expect_same_bits(const Addition& addition) {
    SCOPED_TRACE(fmt::format("{} of {} from {}, accumulates {}, factor {}, shifts {} and {}",
                             addition.count(), name_of(addition.type), addition.first, addition.accumulate,
                             addition.factor, addition.shift, addition.to_shift));
    const Sums expected = on_cpu(addition), found = on_gpu(addition);
    EXPECT_EQ(std::memcmp(found.to.data(), expected.to.data(), 4 * found.to.size()), 0);
    expect_same(found.squares, expected.squares);
  }
  static void expect_same(const SquareSum& found, const SquareSum& expected) {
    EXPECT_EQ(found.finite, expected.finite);
    EXPECT_EQ(found.sum.first(), expected.sum.first());
    EXPECT_EQ(found.sum.end(), expected.sum.end());
    EXPECT_EQ(found.sum.nodes(), expected.sum.nodes());
  }
  // The arrays of the ranks, of which the mean is taken.
  struct Parts {
    std::size_t count = 0;
    std::vector<Dtype> types;  // by rank
    std::vector<std::vector<std::byte>> values;
    std::size_t shift = 0;            // in elements, by which arrays begin beyond multiples of 256 bytes
    std::size_t in_place = SIZE_MAX;  // the rank whose array the mean takes the place of
    float factor = 1;
    std::size_t shifted = SIZE_MAX;  // the one rank whose array is shifted; the number of ranks: the mean

    std::size_t shift_of(std::size_t rank) const {
      return shifted == SIZE_MAX || shifted == rank ? shift : 0;
    }
  };
  static Parts parts_of(std::size_t count, const std::vector<Dtype>& types) {
    Parts parts{count, types, {}, 0, SIZE_MAX, 1 / static_cast<float>(types.size()), SIZE_MAX};
    for (std::size_t rank = 0; rank < types.size(); ++rank)
      parts.values.push_back(make_values(count, types[rank], 100 * count + rank));
    return parts;
  }
  Sums mean_on_cpu(const Parts& parts) {
    std::vector<ConstArray> arrays;
    for (std::size_t rank = 0; rank < parts.types.size(); ++rank)
      arrays.push_back({parts.values[rank].data(), parts.types[rank]});
    Sums sums{std::vector<float>(parts.count), {}};
    const Array to{sums.to.data(), Dtype::kF32};
    comm::Adder().add(arrays, comm::order_of_ranks(static_cast<int>(arrays.size())).merges, parts.count, to);
    scale(threads_, parts.count, parts.factor, to);
    sums.squares = sum_of_squares(threads_, 0, parts.count, to);
    return sums;
  }
  Sums mean_on_gpu(const Parts& parts) {
    const std::size_t n = parts.count, blocks = divide_up(n, kGridBlock);
    Memory memory(*device_, (parts.types.size() + 1) * (4 * n + 512) + 8 * blocks);
    std::vector<ConstArray> arrays;
    std::byte* to = nullptr;
    for (std::size_t rank = 0; rank < parts.types.size(); ++rank) {
      const std::vector<std::byte>& values = parts.values[rank];
      std::byte* const at = memory.take(values.size(), parts.shift_of(rank) * size_of(parts.types[rank]));
      std::ranges::copy(values, at);
      arrays.push_back({memory.on_gpu(at), parts.types[rank]});
      if (rank == parts.in_place) to = at;
    }
    if (to == nullptr) to = memory.take(4 * n, parts.shift_of(parts.types.size()) * sizeof(float));
    auto* const leaves = reinterpret_cast<double*>(memory.take(8 * blocks, 0));
    memory.copy_in();
    DeviceSum(*device_).mean(memory.stream(), arrays, n, parts.factor, {memory.on_gpu(to), Dtype::kF32},
                             memory.on_gpu(leaves));
    memory.copy_out();
    const auto* const means = reinterpret_cast<const float*>(to);
    return {{means, means + n}, added_up(0, {leaves, leaves + blocks})};
  }
  void expect_same_mean(const Parts& parts) {
    SCOPED_TRACE(fmt::format("{} elements of {} ranks, the first of {}, shift {}, in place of {}",
                             parts.count, parts.types.size(), name_of(parts.types[0]), parts.shift,
                             parts.in_place));
    const Sums expected = mean_on_cpu(parts), found = mean_on_gpu(parts);
    EXPECT_EQ(std::memcmp(found.to.data(), expected.to.data(), 4 * found.to.size()), 0);
    expect_same(found.squares, expected.squares);
  }
  // The GPU's memory, and the host's of the same places. What is beyond each array stays as it was.
  class Memory {
   public:
    // For a few arrays that have so many bytes together.
    Memory(Device& device, std::size_t bytes)
        : device_(device),
          bytes_(round_up(bytes + 4096, kMiB)),
          gpu_(ledger_, device, allocator::Purpose::kGradient, bytes_),
          host_(device, bytes_),
          stream_(device.make_stream(false)) {
      std::fill_n(host_.data(), bytes_, kUntouched);
    }
    ~Memory() {
      at_the_end([&] { device_.synchronize(stream_.get()); });
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    CUstream_st* stream() const { return stream_.get(); }
    // An array in the host's memory that begins so many bytes beyond a multiple of 256.
    std::byte* take(std::size_t bytes, std::size_t shift) {
      std::byte* const at = host_.data() + end_ + shift;
      ends_.push_back(end_ + shift + bytes);
      end_ = round_up(ends_.back() + 1, 256);
      if (end_ > bytes_) throw std::length_error("this test's memory is too small");
      return at;
    }
    template <class T>
    T* on_gpu(T* at) {
      return reinterpret_cast<T*>(
          gpu_.address() + static_cast<DeviceAddress>(reinterpret_cast<std::byte*>(at) - host_.data()));
    }
    void copy_in() { device_.copy_in(stream_.get(), gpu_.address(), host_.data(), end_); }
    void copy_out() {
      device_.copy_out(stream_.get(), host_.data(), gpu_.address(), end_);
      device_.synchronize(stream_.get());
      for (const std::size_t end : ends_) EXPECT_EQ(host_.data()[end], kUntouched) << "beyond an array";
    }

   private:
    static constexpr std::byte kUntouched{0xa5};
    Device& device_;
    std::size_t bytes_;
    allocator::Ledger ledger_;
    allocator::DeviceRegion gpu_;
    HostMemory host_;
    Device::Stream stream_;
    std::vector<std::size_t> ends_;
    std::size_t end_ = 0;
  };
  Threads threads_{2};
};

TEST_F(SquaresTest, EachTypeAndLengthHasTheBitsOfTheCpu) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t n : {1, 3, 15, 16, 17, 127, 129, 1023, 1024, 1025, 2048, 32769, 70001})
      for (const bool accumulate : {false, true})
        expect_same_bits({make_values(n, type, n), type, accumulate, accumulate ? 0.75f : 1});
}

TEST_F(SquaresTest, ArraysThatBeginAnywhereHaveThem) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t elements : {0, 1, 2, 3, 4})
      for (const std::size_t to_elements : {0, 1, 2, 4})
        for (const bool accumulate : {false, true})
          expect_same_bits({make_values(3333, type, elements), type, accumulate, 1, 5 * kGridBlock,
                            elements * size_of(type), to_elements * sizeof(float)});
}

// The nodes of the tree that a GPU puts together have these blocks, and more.
TEST_F(SquaresTest, LongSpansHaveThemWhereverTheyBegin) {
  constexpr std::size_t kMost = kGridBlock << DeviceSquares::kMostLevel;
  for (const std::size_t first : {std::size_t{0}, 1021 * kGridBlock, kMost})
    expect_same_bits(
        {make_values(kMost + 5 * kGridBlock + 3, Dtype::kBf16, first), Dtype::kBf16, false, 1, first});
}

TEST_F(SquaresTest, SumsOfAnyBlocksHaveTheBitsOfTheWrittenOrder) {
  for (const std::size_t first : {0, 1, 7, 512, 1000, 1023, 1024, 3071})
    for (const std::size_t count : {1, 2, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 2049, 5000}) {
      SCOPED_TRACE(fmt::format("{} from {}", count, first));
      const std::vector<std::byte> values = make_values(count, Dtype::kF32, first);
      PartialSum expected(first);
      std::vector<double> leaves;
      for (std::size_t i = 0; i < count; ++i) {
        float value = 0;
        std::memcpy(&value, values.data() + 4 * i, sizeof value);
        leaves.push_back(static_cast<double>(value) * static_cast<double>(value) / 3);
        expected.add(leaves.back());
      }
      expect_same(added_up(first * kGridBlock, leaves), {expected, true});
    }
}

// The greatest f32 values have squares that are finite in f64.
TEST_F(SquaresTest, OneElementThatIsNotFiniteIsFound) {
  constexpr std::size_t kCount = 5000;
  std::vector<std::byte> bytes(4 * kCount);
  for (std::size_t i = 0; i < kCount; ++i) put(bytes, i, Dtype::kF32, std::numeric_limits<float>::max());
  expect_same_bits({bytes});
  EXPECT_TRUE(on_gpu({bytes}).squares.finite);
  for (const float special : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()})
    for (const std::size_t at : {std::size_t{0}, std::size_t{1024}, std::size_t{3333}, kCount - 1}) {
      auto with_one = make_values(kCount, Dtype::kF32, at);
      put(with_one, at, Dtype::kF32, special);
      EXPECT_FALSE(on_gpu({with_one}).squares.finite) << special << " at " << at;
    }
}

TEST_F(SquaresTest, EachDriverCallThatFailsIsAnErrorAndLeavesNothing) {
  SLUICE_NEEDS_THE_FAKE();
  const auto bytes = make_values(3000, Dtype::kBf16, 1);
  const auto scenario = [&] {
    device_ = open_device(0);
    on_gpu({bytes, Dtype::kBf16});
    device_.reset();
  };
  device_.reset();
  fake()->begin({});
  scenario();
  int failures = 0;
  const auto counts = fake()->counts();
  for (const char* function : {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"})
    for (std::uint64_t n = 0; n < counts.calls.at(function); ++n, ++failures) {
      fake()->begin({});
      fake()->fail(function, n, 719);
      expect_error(ErrorCode::kIo, {function}, scenario);
      device_.reset();
      EXPECT_EQ(fake()->alive(), std::vector<std::string>{}) << function << " " << n;
      EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{}) << function << " " << n;
    }
  EXPECT_GE(failures, 3);
}

// A gradient that is handed out is stored in its type before it is multiplied, as on the CPU.
TEST_F(SquaresTest, CopiesHaveTheBitsOfTheCpu) {
  constexpr Dtype kTypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
  for (const Dtype from_type : kTypes)
    for (const Dtype type : kTypes)
      for (const std::size_t n : {1, 4, 5, 1023, 2048, 5001})
        for (const std::size_t shift : {0, 1, 4})
          for (const float factor : {1.0f, 0.3f}) {
            SCOPED_TRACE(fmt::format("{} of {} from {}, shift {}, factor {}", n, name_of(type),
                                     name_of(from_type), shift, factor));
            const std::vector<std::byte> values = make_values(n, from_type, n);
            Memory memory(*device_, n * size_of(from_type) + n * size_of(type));
            std::byte* const from = memory.take(n * size_of(from_type), shift * size_of(from_type));
            std::ranges::copy(values, from);
            std::byte* const to = memory.take(n * size_of(type), shift * size_of(type));
            memory.copy_in();
            DeviceSum(*device_).copy(memory.stream(), n, {memory.on_gpu(from), from_type}, factor,
                                     {memory.on_gpu(to), type});
            memory.copy_out();
            std::vector<std::byte> expected(n * size_of(type));
            std::vector<float> wide(n);
            convert(threads_, n, {values.data(), from_type}, {wide.data(), Dtype::kF32});
            convert(threads_, n, {wide.data(), Dtype::kF32}, {expected.data(), type});
            if (factor != 1) scale(threads_, n, factor, {expected.data(), type});
            EXPECT_EQ(std::memcmp(to, expected.data(), expected.size()), 0);
          }
}

// A gradient that is the only one stays as it came, and has the squares of a sum.
TEST_F(SquaresTest, WhatIsNotAddedKeepsItsType) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t n : {1, 5, 1024, 5001})
      for (const std::size_t shift : {0, 1}) {
        SCOPED_TRACE(fmt::format("{} of {}, shift {}", n, name_of(type), shift));
        const std::vector<std::byte> values = make_values(n, type, n);
        const std::size_t blocks = divide_up(n, kGridBlock);
        Memory memory(*device_, 2 * values.size() + 8 * blocks);
        std::byte* const from = memory.take(values.size(), shift * size_of(type));
        std::ranges::copy(values, from);
        std::byte* const to = memory.take(values.size(), shift * size_of(type));
        auto* const leaves = reinterpret_cast<double*>(memory.take(8 * blocks, 0));
        memory.copy_in();
        DeviceSum(*device_).add(memory.stream(), n, {memory.on_gpu(from), type}, false, 1,
                                {memory.on_gpu(to), type}, memory.on_gpu(leaves));
        memory.copy_out();
        EXPECT_EQ(std::memcmp(to, values.data(), values.size()), 0);
        std::vector<float> sums(n);
        const SquareSum expected =
            store_summing_squares(threads_, 0, n, {values.data(), type}, false, sums.data());
        const SquareSum found = added_up(0, {leaves, leaves + blocks});
        EXPECT_EQ(found.sum.total(), expected.sum.total());
        EXPECT_EQ(found.finite, expected.finite);
      }
}

TEST_F(SquaresTest, MeansOverRanksHaveTheBitsOfTheCpu) {
  constexpr Dtype kTypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
  for (std::size_t ranks = 1; ranks <= DeviceSum::kMostRanks; ++ranks)
    for (const std::size_t n : {1, 1023, 1024, 5000})
      for (const std::size_t first : {0, 1, 2})
        for (const bool mixed : {false, true}) {
          std::vector<Dtype> types;
          for (std::size_t rank = 0; rank < ranks; ++rank)
            types.push_back(kTypes[(first + (mixed ? rank : 0)) % 3]);
          Parts parts = parts_of(n, types);
          if (mixed && n == 5000) parts.shift = 1 + first;
          if (mixed && n == 1024) parts.factor = 1;
          expect_same_mean(parts);
        }
  expect_same_mean(parts_of(300003, {Dtype::kBf16, Dtype::kBf16, Dtype::kF32, Dtype::kF16, Dtype::kBf16}));
  for (const Dtype type : kTypes)  // one array alone is not packed
    for (std::size_t shifted = 0; shifted <= 3; ++shifted) {
      Parts parts = parts_of(5000, {Dtype::kF32, type, Dtype::kBf16});
      parts.shift = 1;
      parts.shifted = shifted;
      expect_same_mean(parts);
    }
}

TEST_F(SquaresTest, AMeanMayTakeThePlaceOfAnyRanksArray) {
  for (const std::size_t ranks : {1, 2, 5, 16})
    for (const std::size_t in_place : {std::size_t{0}, ranks / 2, ranks - 1})
      for (const std::size_t shift : {0, 1}) {
        std::vector<Dtype> types(ranks, Dtype::kBf16);
        types[in_place] = Dtype::kF32;
        Parts parts = parts_of(5000, types);
        parts.in_place = in_place;
        parts.shift = shift;
        expect_same_mean(parts);
      }
}

// Only the bits of NaN may be others.
TEST_F(SquaresTest, MeansOfWhatIsNotFiniteAreThoseOfTheCpu) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t ranks : {1, 2, 5}) {
      Parts parts = parts_of(5000, std::vector<Dtype>(ranks, type));
      put(parts.values[0], 3, type, kInfinity);
      put(parts.values[0], 1030, type, kInfinity);
      put(parts.values[ranks - 1], 1030, type, -kInfinity);
      put(parts.values[ranks - 1], 4999, type, std::numeric_limits<float>::quiet_NaN());
      for (std::vector<std::byte>& values : parts.values) put(values, 5, type, -0.0f);
      const Sums expected = mean_on_cpu(parts), found = mean_on_gpu(parts);
      for (std::size_t i = 0; i < parts.count; ++i) {
        const bool is_nan = std::isnan(expected.to[i]);
        ASSERT_EQ(std::isnan(found.to[i]), is_nan) << i;
        if (is_nan) continue;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(found.to[i]), std::bit_cast<std::uint32_t>(expected.to[i]))
            << i;
      }
      EXPECT_TRUE(std::signbit(found.to[5]));
      EXPECT_TRUE(std::isinf(found.to[3]));
      EXPECT_TRUE(std::isnan(found.to[4999]));
      EXPECT_FALSE(found.squares.finite);
    }
}

TEST_F(SquaresTest, NothingIsQueuedForNoElements) {
  const ConstArray none{nullptr, Dtype::kF32};
  DeviceSum(*device_).mean(nullptr, {&none, 1}, 0, 1, {nullptr, Dtype::kF32}, nullptr);
  DeviceSum(*device_).add(nullptr, 0, {nullptr, Dtype::kF32}, false, 1, {nullptr, Dtype::kF32}, nullptr);
  DeviceSum(*device_).copy(nullptr, 0, {nullptr, Dtype::kF32}, 1, {nullptr, Dtype::kF32});
  DeviceSquares(*device_).add_up(nullptr, 0, nullptr, 0, nullptr, nullptr);
  DeviceSquares(*device_).check(nullptr, 0, nullptr, nullptr);
}

TEST_F(SquaresTest, WhatIsNotAlignedOrNoFloatIsRefused) {
  DeviceSum sum(*device_);
  DeviceSquares squares(*device_);
  const auto at = [](std::uintptr_t address, Dtype type = Dtype::kF32) {
    return Array{reinterpret_cast<void*>(address), type};
  };
  const auto doubles = [](std::uintptr_t address) { return reinterpret_cast<double*>(address); };
  const auto add = [&](ConstArray from, Array to, double* leaves) {
    sum.add(nullptr, 1, from, false, 1, to, leaves);
  };
  const auto mean = [&](std::vector<ConstArray> ranks, Array to) {
    sum.mean(nullptr, ranks, 1, 1, to, doubles(256));
  };
  const std::tuple<const char*, const char*, std::function<void()>> refused[] = {
      {"f32", "no multiple of 4", [&] { add(at(258), at(256), doubles(256)); }},
      {"f32", "no multiple of 4", [&] { add(at(256), at(258), doubles(256)); }},
      {"f64", "no multiple of 8", [&] { add(at(256), at(256), doubles(260)); }},
      {"f32, bf16 or f16", "u8", [&] { add(at(256, Dtype::kU8), at(256), doubles(256)); }},
      {"bf16", "no multiple of 2",
       [&] {
         mean({at(256), at(257, Dtype::kBf16)}, at(256));
       }},
      {"f32, bf16 or f16", "u8", [&] { mean({at(256, Dtype::kU8)}, at(256)); }},
      {"not f32", "", [&] { mean({at(256)}, at(256, Dtype::kBf16)); }},
      {"f32", "no multiple of 4", [&] { mean({at(256)}, at(258)); }},
      {"0 ranks", "", [&] { mean({}, at(256)); }},
      {"17 ranks", "1 to 16", [&] { mean(std::vector<ConstArray>(17, at(256)), at(256)); }},
      {"f64", "no multiple of 8",
       [&] { squares.add_up(nullptr, 1, reinterpret_cast<SumNode*>(256), 1, doubles(256), doubles(260)); }},
      {"u32", "no multiple of 4",
       [&] { squares.check(nullptr, 1, doubles(256), reinterpret_cast<std::uint32_t*>(258)); }}};
  for (const auto& [what, why, call] : refused) expect_error(ErrorCode::kInternal, {what, why}, call);
}

}  // namespace sluice::kernels::squares_test
