#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/worlds.h"
#include "core/dtype.h"
#include "thrown.h"

// Holds every kind of links to the same contract: what a communicator computes over them.
namespace sluice::comm {
namespace {

// Values that each rank can compute for all ranks, whose sum depends on the order of additions.
float value_of(std::uint64_t seed, int rank, std::size_t i) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(rank) * 0xd1342543de82ef95 + i;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 29)) * 0x94d049bb133111eb;
  constexpr float kScales[] = {1.0f / 4096, 1.0f / 64, 1, 64};
  return static_cast<float>(static_cast<int>(x >> 40 & 2047) - 1024) * kScales[x >> 60 & 3];
}

void set(Array array, std::size_t i, float value) {
  if (array.type == Dtype::kF32) array.f32()[i] = value;
  if (array.type == Dtype::kBf16) array.bf16()[i] = to_bf16(value);
  if (array.type == Dtype::kF16) array.f16()[i] = to_f16(value);
}
float get(ConstArray array, std::size_t i) {
  if (array.type == Dtype::kF32) return array.f32()[i];
  return array.type == Dtype::kBf16 ? to_f32(array.bf16()[i]) : to_f32(array.f16()[i]);
}

class Values {
 public:
  Values(Dtype type, std::size_t count) : type_(type), bytes_(count * size_of(type) + 1), count_(count) {}
  Values(Dtype type, std::size_t count, std::uint64_t seed, int rank) : Values(type, count) {
    for (std::size_t i = 0; i < count; ++i) set(array(), i, value_of(seed, rank, i));
  }
  Array array() { return {bytes_.data(), type_}; }
  std::size_t count() const { return count_; }
  bool operator==(const Values&) const = default;

 private:
  Dtype type_;
  std::vector<std::byte> bytes_;
  std::size_t count_;
};

// The sum of elements begin ... end - 1 over all ranks, element after element; the rest is as `rank` has it.
Values sum_of(Dtype type, std::size_t count, std::uint64_t seed, int rank, int ranks, std::size_t begin,
              std::size_t end) {
  Values sum(type, count, seed, rank), one(type, 1);
  for (std::size_t i = begin; i < end; ++i) {
    float total = 0;
    for (int r = 0; r < ranks; ++r) {
      set(one.array(), 0, value_of(seed, r, i));
      total = r == 0 ? get(one.array(), 0) : total + get(one.array(), 0);
    }
    set(sum.array(), i, total);
  }
  return sum;
}

std::vector<std::size_t> borders_of(std::uint64_t seed, std::size_t count, int ranks) {
  std::mt19937_64 random(seed);
  std::vector<std::size_t> borders{0, count};
  for (int i = 1; i < ranks; ++i) borders.push_back(random() % 3 == 0 ? count : random() % (count + 1));
  std::sort(borders.begin(), borders.end());
  return borders;
}

using Case = std::tuple<World, int>;
class Conformance : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (world() == World::kProcesses && !kForksAllowed)
      GTEST_SKIP() << "ThreadSanitizer follows no threads of forked processes";
  }
  World world() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  std::size_t most() const { return world() == World::kTinyPackets ? 3001 : 200'003; }
  void run(const std::function<void(Communicator& comm)>& body) { run_communicators(world(), ranks(), body); }
};

TEST_P(Conformance, ReduceScatterAddsInTheOrderOfRanks) {
  run([&](Communicator& comm) {
    std::uint64_t id = 0;
    for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17}, most()}) {
        const auto borders = borders_of(++id, count, comm.size());
        Values values(type, count, id, comm.rank());
        Ending end;
        comm.reduce_scatter(id, "x", values.array(), borders, end.done());
        end.wait();
        const auto rank = static_cast<std::size_t>(comm.rank());
        EXPECT_EQ(values, sum_of(type, count, id, comm.rank(), comm.size(), borders[rank], borders[rank + 1]))
            << name_of(type) << " " << count;
      }
  });
}

TEST_P(Conformance, AllReduceAddsInTheOrderOfRanks) {
  run([&](Communicator& comm) {
    std::uint64_t id = 0;
    for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{4097}, most()}) {
        Values values(type, count, ++id, comm.rank());
        Ending end;
        comm.all_reduce(id, "x", values.array(), count, end.done());
        end.wait();
        EXPECT_EQ(values, sum_of(type, count, id, comm.rank(), comm.size(), 0, count))
            << name_of(type) << " " << count;
      }
  });
}

TEST_P(Conformance, IntegersAreAddedExactlyAndDoublesInF64) {
  run([&](Communicator& comm) {
    const std::size_t count = 1001;
    std::vector<std::int64_t> integers(count), integer_sum(count);
    std::vector<double> doubles(count), double_sum(count);
    for (int rank = 0; rank < comm.size(); ++rank)
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t integer = (std::int64_t{1} << 54) + static_cast<std::int64_t>(i) * (rank + 1);
        const double real = std::ldexp(value_of(9, rank, i), rank * 5) / 3;
        integer_sum[i] += integer;
        double_sum[i] = rank == 0 ? real : double_sum[i] + real;
        if (rank == comm.rank()) integers[i] = integer, doubles[i] = real;
      }
    Ending first, second;
    comm.all_reduce(1, "integers", std::span(integers), first.done());
    comm.all_reduce(2, "doubles", std::span(doubles), second.done());
    first.wait();
    second.wait();
    EXPECT_EQ(integers, integer_sum);
    EXPECT_EQ(doubles, double_sum);
  });
}

TEST_P(Conformance, AllGatherBringsEachPart) {
  run([&](Communicator& comm) {
    std::uint64_t id = 0;
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{29}, most()}) {
      const auto borders = borders_of(++id, count, comm.size());
      std::vector<std::uint8_t> values(count, 0xee), all(count);
      for (std::size_t r = 0; r < static_cast<std::size_t>(comm.size()); ++r)
        for (std::size_t i = borders[r]; i < borders[r + 1]; ++i) {
          all[i] = static_cast<std::uint8_t>(i * 31 + r);
          if (r == static_cast<std::size_t>(comm.rank())) values[i] = all[i];
        }
      Ending end;
      comm.all_gather(id, "bytes", {values.data(), Dtype::kU8}, borders, end.done());
      end.wait();
      EXPECT_EQ(values, all) << count;
    }
  });
}

TEST_P(Conformance, BroadcastBringsWhatTheRootHas) {
  run([&](Communicator& comm) {
    for (int root = 0; root < comm.size(); ++root)
      for (const std::size_t count : {std::size_t{0}, std::size_t{3}, most()}) {
        std::vector<std::byte> bytes(count, static_cast<std::byte>(comm.rank() + 1));
        Ending end;
        comm.broadcast(7, "bytes", bytes, root, end.done());
        end.wait();
        EXPECT_EQ(bytes, std::vector(count, static_cast<std::byte>(root + 1)));
      }
  });
}

TEST_P(Conformance, ExchangeBringsStringsOfAnySize) {
  run([&](Communicator& comm) {
    const auto text = [](int rank, int turn) {
      if (turn == 1) return std::string();
      if (rank % 3 == 1) return std::string();
      return std::string(static_cast<std::size_t>(rank) * 9001 + static_cast<std::size_t>(turn),
                         static_cast<char>('a' + rank));
    };
    for (int turn = 0; turn < 3; ++turn) {
      std::vector<std::string> all;
      for (int rank = 0; rank < comm.size(); ++rank) all.push_back(text(rank, turn));
      EXPECT_EQ(comm.exchange(3, "names", text(comm.rank(), turn)), all);
      comm.barrier(3, "names");
    }
    EXPECT_NE(message_of([&] { comm.exchange(4, "long", std::string(65537, 'x')); }).find("65537 bytes"),
              std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Links, Conformance,
                         testing::Combine(testing::Values(World::kThreads, World::kProcesses, World::kFaulty,
                                                          World::kTinyPackets),
                                          testing::Values(1, 2, 3, 8)));

}  // namespace
}  // namespace sluice::comm
