#include "models/families/weights.h"

#include "core/error.h"
#include "core/json.h"
#include "models/families/gpt2.h"
#include "temporary_folder.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::weights_test {

// Makes a file by the format's own description, without the project's writer.
class FileMaker {
 public:
  void add(const std::string& name, const std::string& type, const std::vector<std::size_t>& shape,
           const std::string& bytes) {
    header_[name] = {{"dtype", type},
                     {"shape", shape},
                     {"data_offsets", {payload_.size(), payload_.size() + bytes.size()}}};
    payload_ += bytes;
  }
  template <class T>
  void add(const std::string& name, const std::string& type, const std::vector<std::size_t>& shape,
           const std::vector<T>& values) {
    add(name, type, shape,
        std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)));
  }
  void save(const std::string& path) const {
    const std::string text = header_.dump();
    const std::uint64_t size = text.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), 8);
    file << text << payload_;
  }

 private:
  Json header_ = Json::object();
  std::string payload_;
};

class WeightsTest : public ::testing::Test {
 protected:
  WeightsTest() {
    config_.family = &kGpt2;
    config_.tied_head = true;
  }

  std::unique_ptr<HuggingFaceWeights> open() {
    maker_.save(folder_ / "model.safetensors");
    return std::make_unique<HuggingFaceWeights>(*io_, folder_.path(), config_, layout_, ahead_);
  }
  std::vector<float> values(engine::ParameterId id, std::size_t first, std::size_t count) {
    std::vector<float> out(count);
    open()->source().values(id, first, out);
    return out;
  }
  std::string error() {
    return message_of([&] { open(); });
  }
  void add_bias(const std::string& name = "h.0.attn.c_attn.bias") {
    maker_.add<float>(name, "F32", {2}, {5, 6});
  }
  void add_table(const std::string& name = "wte.weight") {
    maker_.add<float>(name, "F32", {3, 2}, {1, 2, 3, 4, 5, 6});
  }

  TemporaryFolder folder_;
  ModelConfig config_;
  engine::Layout layout_{{{"embedding", {{"transformer.wte.weight", {3, 2}, true, 2}}},
                          {"block", {{"transformer.h.0.attn.c_attn.bias", {2}}}}}};
  FileMaker maker_;
  std::unique_ptr<offload::IoService> io_ = offload::make_thread_service({});
  allocator::Ledger ledger_;
  allocator::Region buffer_{ledger_, allocator::Purpose::kCheckpoint, engine::kStreamBuffer};
  engine::ReadAhead ahead_{buffer_.bytes()};
};

TEST_F(WeightsTest, ReadsEveryPartOfAParameterWithAndWithoutPrefix) {
  add_table();
  add_bias("transformer.h.0.attn.c_attn.bias");
  EXPECT_THAT(values(0, 0, 6), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(values(0, 3, 2), ElementsAre(4, 5));
  EXPECT_THAT(values(1, 1, 1), ElementsAre(6));
}

TEST_F(WeightsTest, WidensBf16) {
  maker_.add<std::uint16_t>("wte.weight", "BF16", {3, 2}, {0x3f80, 0xc000, 0x0000, 0x3e00, 0x7f80, 0x8000});
  add_bias();
  EXPECT_THAT(values(0, 0, 5), ElementsAre(1.0f, -2.0f, 0.0f, 0.125f, HUGE_VALF));
  EXPECT_THAT(values(0, 1, 3), ElementsAre(-2.0f, 0.0f, 0.125f));
}

TEST_F(WeightsTest, WidensF16) {
  // These are 1, -2, the least subnormal, the greatest finite, the least normal, and -infinity.
  maker_.add<std::uint16_t>("wte.weight", "F16", {3, 2}, {0x3c00, 0xc000, 0x0001, 0x7bff, 0x0400, 0xfc00});
  add_bias();
  EXPECT_THAT(values(0, 0, 6), ElementsAre(1.0f, -2.0f, 0x1p-24f, 65504.0f, 0x1p-14f, -HUGE_VALF));
}

TEST_F(WeightsTest, WidensRunsOfAnyLength) {
  constexpr std::size_t kCount = 3000;
  std::vector<std::uint16_t> bits(kCount);
  for (std::size_t i = 0; i < kCount; ++i) bits[i] = static_cast<std::uint16_t>(0x3f80 + i);
  layout_ = engine::Layout{{{"embedding", {{"wte.weight", {kCount}}}}}};
  maker_.add("wte.weight", "BF16", {kCount}, bits);
  for (const std::size_t count : {1, 255, 256, 257, 511, 513, 2999}) {
    const std::vector<float> found = values(0, 1, count);
    for (std::size_t i = 0; i < count; ++i)
      ASSERT_EQ(found[i], to_f32(Bf16{bits[i + 1]})) << count << ", " << i;
  }
}

TEST_F(WeightsTest, BuffersAreIgnored) {
  add_table();
  add_bias();
  maker_.add("h.0.attn.bias", "BOOL", {2}, std::string(2, '\1'));
  maker_.add("h.0.attn.masked_bias", "F32", {1}, std::string(4, '\0'));
  EXPECT_NO_THROW(open());
}

TEST_F(WeightsTest, EveryMisfitIsNamed) {
  maker_.add<float>("wte.weight", "F32", {2, 3}, {1, 2, 3, 4, 5, 6});
  maker_.add<float>("h.1.attn.c_attn.bias", "F32", {2}, {5, 6});
  EXPECT_THAT(error(), AllOf(HasSubstr("'wte.weight' has the shape [2, 3]"), HasSubstr("[3, 2]"),
                             HasSubstr("'transformer.h.0.attn.c_attn.bias' is missing"),
                             HasSubstr("'h.1.attn.c_attn.bias' is not a parameter")));
}

TEST_F(WeightsTest, AnUnusableTypeIsNamed) {
  maker_.add("wte.weight", "I64", {3, 2}, std::string(48, '\0'));
  add_bias();
  EXPECT_THAT(error(), HasSubstr("I64"));
}

TEST_F(WeightsTest, ATiedHeadMayBeThereWhereItIsTheSame) {
  add_table();
  add_bias();
  add_table("lm_head.weight");
  EXPECT_NO_THROW(open());
}

TEST_F(WeightsTest, ATiedHeadThatDiffersIsRefused) {
  add_table();
  add_bias();
  maker_.add<float>("lm_head.weight", "F32", {3, 2}, {1, 2, 3, 4, 5, 7});
  EXPECT_THAT(error(), HasSubstr("lm_head.weight"));
}

TEST_F(WeightsTest, AMissingFolderAndACutFileAreErrors) {
  EXPECT_THROW(HuggingFaceWeights(*io_, folder_ / "nowhere", config_, layout_, ahead_), Error);
  add_table();
  add_bias();
  open();
  std::filesystem::resize_file(folder_ / "model.safetensors", 60);
  EXPECT_THROW(HuggingFaceWeights(*io_, folder_.path(), config_, layout_, ahead_), Error);
}

}  // namespace sluice::models::weights_test
