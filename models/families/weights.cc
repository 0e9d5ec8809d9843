#include "models/families/weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/checkpoint/stored_floats.h"
#include "models/families/family.h"

namespace sluice::models {
namespace {

bool is_buffer(const Family& family, const std::string& name) {
  return std::ranges::any_of(family.buffers, [&](std::string_view end) { return name.ends_with(end); });
}

std::string without_prefix(const Family& family, const std::string& name) {
  return name.starts_with(family.prefix) ? name.substr(family.prefix.size()) : name;
}

std::string listing(std::vector<std::string> lines) {
  const std::size_t count = lines.size();
  if (count > 8) lines.resize(8);
  return fmt::format("{}{}", fmt::join(lines, "; "),
                     count > 8 ? fmt::format("; and {} more", count - 8) : "");
}

}  // namespace

HuggingFaceWeights::HuggingFaceWeights(offload::IoService& io, const std::string& folder,
                                       const ModelConfig& config, const engine::Layout& layout,
                                       engine::ReadAhead& ahead)
    : folder_(io, folder, ahead) {
  match(*config.family, layout);
  if (config.tied_head) match_head(*config.family, layout);
}

void HuggingFaceWeights::match(const Family& family, const engine::Layout& layout) {
  std::vector<std::string> wrong;
  std::set<std::string> left;
  for (const std::string& name : folder_.names())
    if (!is_buffer(family, name)) left.insert(name);
  for (engine::ParameterId id = 0; id < layout.parameters(); ++id) {
    const engine::ParameterSpec& spec = layout.spec(id);
    const std::string name =
        folder_.find(spec.name) != nullptr ? spec.name : without_prefix(family, spec.name);
    const engine::StoredTensor* tensor = folder_.find(name);
    if (tensor == nullptr) {
      wrong.push_back(fmt::format("'{}' is missing", spec.name));
    } else if (!engine::has_shape(*tensor, spec.shape)) {
      wrong.push_back(fmt::format("'{}' has the shape [{}] in '{}', the configuration says [{}]", name,
                                  fmt::join(tensor->shape, ", "), folder_.file_of(name).path(),
                                  fmt::join(spec.shape, ", ")));
    } else if (!engine::is_float(*tensor)) {
      wrong.push_back(fmt::format("'{}' has the type {} in '{}'; F32, F16 and BF16 can be used", name,
                                  tensor->type, folder_.file_of(name).path()));
    }
    left.erase(name);
    names_.push_back(name);
  }
  for (const std::string& name : left) {
    if (name == family.head) {
      left_over_.push_back(name);
    } else {
      wrong.push_back(fmt::format("'{}' is not a parameter of this model, and '{}' holds it", name,
                                  folder_.file_of(name).path()));
    }
  }
  if (!wrong.empty())
    fail(ErrorCode::kInvalidArgument, "the weights in '{}' do not fit its config.json: {}", folder_.path(),
         listing(wrong));
}

void HuggingFaceWeights::match_head(const Family& family, const engine::Layout& layout) {
  if (left_over_.empty()) return;
  engine::ParameterId id = 0;
  while (id < layout.parameters() && layout.spec(id).name != family.table) ++id;
  ensure(id < layout.parameters(), "no parameter is named {}", family.table);
  const engine::StoredTensor& head = folder_.tensor(left_over_.front());
  const engine::StoredTensor& table = folder_.tensor(names_[id]);
  bool same = head.type == table.type && head.shape == table.shape;
  std::vector<std::byte> a(256 * kKiB), b(256 * kKiB);
  for (std::uint64_t at = 0; same && at < head.bytes(); at += a.size()) {
    const std::size_t count = std::min<std::uint64_t>(a.size(), head.bytes() - at);
    folder_.read(head.name, at, std::span(a).first(count));
    folder_.read(table.name, at, std::span(b).first(count));
    same = std::memcmp(a.data(), b.data(), count) == 0;
  }
  if (!same)
    fail(ErrorCode::kInvalidArgument,
         "in '{}' the head '{}' differs from '{}', though config.json ties them (tie_word_embeddings); set "
         "that to false",
         folder_.path(), head.name, table.name);
}

engine::UnitSource HuggingFaceWeights::source() {
  engine::UnitSource source;
  source.values = [this](engine::ParameterId id, std::size_t first, std::span<float> out) {
    engine::read_as_f32(folder_, names_[id], first, out);
  };
  return source;
}

void check_hugging_face_folder(offload::IoService& io, const std::string& folder, const ModelConfig& config,
                               const engine::Layout& layout) {
  allocator::Ledger ledger;
  allocator::Region buffer(ledger, allocator::Purpose::kCheckpoint, engine::kStreamBuffer);
  engine::ReadAhead ahead(buffer.bytes());
  const HuggingFaceWeights checked(io, folder, config, layout, ahead);
}

}  // namespace sluice::models
