#include <fmt/format.h>

#include <barrier>

#include "core/pairwise.h"
#include "models/cases.h"
#include "testing.h"

// Layers that ranks compute in pieces have the values, and the gradients, of whole ones.
namespace sluice::models::testing::tensor_test {

// Ranks along "tensor" that are threads of the test.
class Ranks {
 public:
  explicit Ranks(std::size_t count) : meeting_(static_cast<std::ptrdiff_t>(count)), given_(count) {}

  class Rank : public AxisRanks {
   public:
    Rank(Ranks& ranks, std::size_t rank) : ranks_(ranks), rank_(rank) {}
    void all_reduce(const std::string& name, std::span<float> values,
                    const std::function<void()>& beside) override {
      if (beside) beside();
      const std::vector<std::vector<float>> all = ranks_.exchange(rank_, name, values);
      PairwiseStack order;
      std::vector<std::vector<float>> sums;
      const auto merge = [&](std::size_t times) {
        for (; times > 0; --times) {
          for (std::size_t i = 0; i < values.size(); ++i) sums[sums.size() - 2][i] += sums.back()[i];
          sums.pop_back();
        }
      };
      for (const std::vector<float>& one : all) {
        sums.push_back(one);
        merge(order.push());
      }
      merge(order.carries());
      std::ranges::copy(sums[0], values.begin());
    }
    void all_gather(const std::string& name, Array values, std::size_t count) override {
      const std::size_t floats = count * size_of(values.type) / sizeof(float);
      auto* const data = static_cast<float*>(values.data);
      const std::vector<std::vector<float>> all = ranks_.exchange(rank_, name, {data, floats});
      const std::size_t part = floats / all.size();
      for (std::size_t rank = 0; rank < all.size(); ++rank)
        std::copy_n(all[rank].data() + rank * part, part, data + rank * part);
    }

   private:
    Ranks& ranks_;
    const std::size_t rank_;
  };

 private:
  std::vector<std::vector<float>> exchange(std::size_t rank, const std::string& name,
                                           std::span<const float> values) {
    given_[rank] = {name, {values.begin(), values.end()}};
    meeting_.arrive_and_wait();
    std::vector<std::vector<float>> all;
    for (const auto& [what, given] : given_) {
      if (what != name || given.size() != values.size()) std::abort();  // ranks do not do the same
      all.push_back(given);
    }
    meeting_.arrive_and_wait();
    return all;
  }

  std::barrier<> meeting_;
  std::vector<std::pair<std::string, std::vector<float>>> given_;
};

struct Result {
  double loss = 0, validation = 0;
  std::vector<std::vector<float>> gradients;  // by parameter: what all ranks give, added in their order
};

// REQUIRES: cut.ranks threads of OpenMP can be had.
Result train(const ModelConfig& config, Dtype dtype, const std::string& choice, TensorCut cut) {
  Ranks ranks(cut.ranks);
  std::vector<Result> all(cut.ranks);
  std::vector<std::thread> threads;
  for (cut.rank = 0; cut.rank < cut.ranks; ++cut.rank)
    threads.emplace_back([&ranks, &own = all[cut.rank], &config, &choice, dtype, cut] {
      Threads one(1);
      const auto library = kernels::load_matrix_library(1);
      const Model model(config, dtype, 2, 8, "", cut);
      Ranks::Rank rank(ranks, cut.rank);
      PlainRun run(model, choice, 2, 3, one, *library, {&rank, nullptr});
      randomize(run.source);
      const Data data(model, 3);
      own.loss = run.train(data.micro_batches, 7, 2);
      own.gradients = run.source.all_gradients();
      own.validation = run.executor.evaluate(data.micro_batches[1]);
      EXPECT_TRUE(run.guards_hold());
    });
  for (std::thread& thread : threads) thread.join();
  for (const Result& other : all) {
    EXPECT_EQ(other.loss, all[0].loss);
    EXPECT_EQ(other.validation, all[0].validation);
    if (&other == &all[0]) continue;
    for (std::size_t p = 0; p < other.gradients.size(); ++p)
      for (std::size_t i = 0; i < other.gradients[p].size(); ++i)
        all[0].gradients[p][i] += other.gradients[p][i];
  }
  return all[0];
}

ModelConfig with_heads(ModelConfig config, std::size_t heads, std::size_t kv_heads) {
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_width = 4;
  if (config.family == &kGpt2) config.width = heads * config.head_width;
  return config;
}

struct Case {
  std::string name;
  ModelConfig config;
  Dtype dtype;
  std::string choice;
};

class TensorTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Models, TensorTest,
    ::testing::Values(Case{"gpt2_dropout", with_heads(small_gpt2(true, 0.2f), 4, 4), Dtype::kF32, "none"},
                      Case{"gpt2_bf16", with_heads(small_gpt2(false), 5, 5), Dtype::kBf16, "full"},
                      Case{"llama", with_heads(small_llama(true), 8, 4), Dtype::kF32, "full"},
                      Case{"qwen2_f16", with_heads(small_llama(false, true), 4, 4), Dtype::kF16, "none"}),
    [](const auto& param) { return param.param.name; });

void expect_same_bits(const Result& several, const Result& one) {
  EXPECT_EQ(several.loss, one.loss);
  EXPECT_EQ(several.validation, one.validation);
  for (std::size_t p = 0; p < one.gradients.size(); ++p)
    for (std::size_t i = 0; i < one.gradients[p].size(); ++i)
      ASSERT_EQ(std::bit_cast<std::uint32_t>(several.gradients[p][i]),
                std::bit_cast<std::uint32_t>(one.gradients[p][i]))
          << "parameter " << p << ", element " << i;
}

TEST_P(TensorTest, HasTheBitsOfOneRankThatComputesTheSamePieces) {
  const Case& given = GetParam();
  const Result one = train(given.config, given.dtype, given.choice, {4, 1, 0});
  for (const std::size_t ranks : {2, 4}) {
    SCOPED_TRACE(ranks);
    expect_same_bits(train(given.config, given.dtype, given.choice, {4, ranks, 0}), one);
  }
}

// Of sums that are added in another order, the rounding differs. rounding: that of each of the two.
void expect_near(const Result& cut, const Result& whole, double rounding) {
  EXPECT_NEAR(cut.loss, whole.loss, 2 * rounding * whole.loss);
  EXPECT_NEAR(cut.validation, whole.validation, 2 * rounding * whole.validation);
  for (std::size_t p = 0; p < whole.gradients.size(); ++p) {
    double square = 0;
    for (const float value : whole.gradients[p]) square += static_cast<double>(value) * value;
    for (std::size_t i = 0; i < whole.gradients[p].size(); ++i)
      ASSERT_NEAR(cut.gradients[p][i], whole.gradients[p][i], 12 * rounding * std::sqrt(square))
          << "parameter " << p << ", element " << i;
  }
}

void expect_near_whole(const ModelConfig& config, std::size_t ranks) {
  SCOPED_TRACE(ranks);
  expect_near(train(config, Dtype::kF32, "full", {ranks, ranks, 0}), train(config, Dtype::kF32, "none", {}),
              rounding_of(Model(config, Dtype::kF32, 2, 8), 48));
}

TEST(TensorCutTest, ComputesWhatWholeLayersDo) {
  expect_near_whole(with_heads(small_gpt2(), 5, 5), 3);              // of other sizes
  expect_near_whole(with_heads(small_llama(true), 8, 2), 4);         // which share key/value heads
  expect_near_whole(with_heads(small_llama(false, true), 6, 2), 4);  // unevenly
  expect_near_whole(with_heads(small_gpt2(true, 0.2f), 4, 4), 2);    // with the same elements dropped
}

TEST(TensorCutTest, RefusesMorePiecesThanThereAre) {
  const auto refused = [](const ModelConfig& config, std::size_t ranks) {
    try {
      const Model model(config, Dtype::kF32, 1, 4, "", {ranks, ranks, 0});
    } catch (const Error& error) {
      return error.code() == ErrorCode::kInvalidArgument ? std::string(error.what()) : "";
    }
    return std::string();
  };
  EXPECT_NE(refused(small_gpt2(), 3).find("2 heads"), std::string::npos);
  EXPECT_NE(refused(with_heads(small_llama(), 6, 2), 3).find("2 key/value heads"), std::string::npos);
}

// Trains ranks that have parts of each sequence, in pieces, together. What they give is added as in a run
// with --reproducible: over all pieces of all micro-batches pairwise, the uses last.
Result train_in_parts(const ModelConfig& config, Dtype dtype, std::size_t pieces, std::size_t parts,
                      std::size_t length) {
  constexpr std::size_t kBatch = 2, kCount = 3;
  struct OfRank {
    std::vector<double> losses;  // by micro-batch
    double validation = 0;
    std::vector<std::vector<std::vector<float>>> gradients;  // by parameter and use
  };
  Ranks ranks(parts);
  std::vector<OfRank> all(parts);
  std::uint64_t targets = 0;
  std::vector<std::thread> threads;
  for (std::size_t part = 0; part < parts; ++part)
    threads.emplace_back([&, part, &own = all[part]] {
      Threads one(1);
      const auto library = kernels::load_matrix_library(1);
      const SequenceCut cut{pieces, parts, part};
      const Model whole(config, dtype, kBatch, length), model(config, dtype, kBatch, length, "", {}, cut);
      Ranks::Rank rank(ranks, part);
      PlainRun run(model, "none", 1, kCount, one, *library, {nullptr, &rank});
      randomize(run.source);
      run.source.keep_apart(kCount * cut.own_pieces());
      const Data data(whole, kCount);
      std::vector<std::vector<std::int32_t>> rows;  // tokens and targets of each micro-batch
      std::vector<MicroBatch> micro_batches;
      for (const MicroBatch& of_all : data.micro_batches)
        for (const auto from : {of_all.tokens, of_all.targets}) {
          rows.emplace_back();
          for (const RowPart& at : row_parts(cut, kBatch, length))
            rows.back().insert(rows.back().end(), from.begin() + static_cast<std::ptrdiff_t>(at.whole_row),
                               from.begin() + static_cast<std::ptrdiff_t>(at.whole_row + at.rows));
        }
      for (std::size_t i = 0; i < kCount; ++i)
        micro_batches.push_back({rows[2 * i], rows[2 * i + 1], data.micro_batches[i].first_sample});
      own.losses = run.train_losses(micro_batches, counted_targets(data.micro_batches));
      for (std::size_t p = 0; p < run.source.parameters(); ++p) {
        own.gradients.emplace_back();
        for (int use = 0; use < run.source.spec(p).uses; ++use)
          own.gradients.back().push_back(run.source.kept_apart(p, use));
      }
      own.validation = run.executor.evaluate(micro_batches[1]);
      if (part == 0) targets = counted_targets(data.micro_batches);
      EXPECT_TRUE(run.guards_hold());
    });
  for (std::thread& thread : threads) thread.join();
  const auto over_ranks = [&](const auto& of_rank) {
    std::vector<double> values;
    for (const OfRank& own : all) values.push_back(of_rank(own));
    return pairwise_sum<double>(values);
  };
  Result result;
  std::vector<double> losses;
  for (std::size_t i = 0; i < kCount; ++i)
    losses.push_back(over_ranks([&](const OfRank& own) { return own.losses[i]; }));
  result.loss = loss_of_step(losses, targets);
  result.validation = over_ranks([](const OfRank& own) { return own.validation; });
  const std::size_t own_pieces = pieces / parts;
  for (std::size_t p = 0; p < all[0].gradients.size(); ++p) {
    const std::size_t elements = all[0].gradients[p][0].size() / (kCount * own_pieces);
    result.gradients.emplace_back(elements);
    for (std::size_t use = 0; use < all[0].gradients[p].size(); ++use)
      for (std::size_t i = 0; i < elements; ++i) {
        PairwiseSum<float> sum;
        for (std::size_t k = 0; k < kCount * own_pieces; k += own_pieces)
          for (const OfRank& own : all)
            for (std::size_t piece = k; piece < k + own_pieces; ++piece)
              sum.add(own.gradients[p][use][piece * elements + i]);
        result.gradients[p][i] += sum.total();
      }
  }
  return result;
}

std::vector<ModelConfig> cut_models() {
  return {with_heads(small_gpt2(true, 0.2f), 4, 4), with_heads(small_llama(), 4, 2)};
}

TEST(SequenceCutTest, ComputesWhatWholeSequencesDo) {
  for (ModelConfig config : cut_models())
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16})
      for (const auto& [pieces, parts] : {std::pair(2, 2), {4, 4}}) {
        SCOPED_TRACE(fmt::format("{}, {} pieces on {} ranks", name_of(dtype), pieces, parts));
        const std::size_t length = config.context = 128 * pieces;
        expect_near(train_in_parts(config, dtype, pieces, parts, length),
                    train_in_parts(config, dtype, 1, 1, length),
                    rounding_of(Model(config, dtype, 2, length), 6 * length));
      }
}

TEST(SequenceCutTest, HasTheBitsOfOneRankThatComputesTheSamePieces) {
  for (ModelConfig config : cut_models())
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      config.context = 512;
      const Result one = train_in_parts(config, dtype, 4, 1, config.context);
      for (const std::size_t parts : {2, 4}) {
        SCOPED_TRACE(fmt::format("{} on {} ranks", name_of(dtype), parts));
        expect_same_bits(train_in_parts(config, dtype, 4, parts, config.context), one);
      }
    }
}

}  // namespace sluice::models::testing::tensor_test
