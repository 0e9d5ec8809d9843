#include "models/families/weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/kind.h"
#include "engine/store/state_format.h"

namespace sluice::models {
namespace {

// Values of 2 bytes that lie in the upper half of `out` become f32 in place, a few at a time: what is written
// never reaches what was not read yet.
void widen(Dtype type, std::span<float> out) {
  std::array<std::uint16_t, 256> bits = {};
  for (std::size_t at = 0; at < out.size(); at += bits.size()) {
    const std::size_t count = std::min(bits.size(), out.size() - at);
    const std::span<const std::byte> upper = std::as_bytes(out).subspan(2 * out.size() + 2 * at, 2 * count);
    std::memcpy(bits.data(), upper.data(), upper.size());
    for (std::size_t i = 0; i < count; ++i)
      out[at + i] = type == Dtype::kBf16 ? to_f32(Bf16{bits[i]}) : to_f32(F16{bits[i]});
  }
}

bool is_buffer(const std::string& name) {
  static constexpr std::array<std::string_view, 3> kEnds = {".attn.bias", ".attn.masked_bias",
                                                            ".rotary_emb.inv_freq"};
  return std::any_of(kEnds.begin(), kEnds.end(), [&](std::string_view end) { return name.ends_with(end); });
}

std::string without_prefix(const std::string& name) {
  for (const std::string_view prefix : {"transformer.", "model."})
    if (name.starts_with(prefix)) return name.substr(prefix.size());
  return name;
}

bool same_shape(const engine::StoredTensor& tensor, const engine::ParameterSpec& spec) {
  return std::equal(tensor.shape.begin(), tensor.shape.end(), spec.shape.begin(), spec.shape.end());
}

bool is_trainable(const engine::Layout& layout, engine::ParameterId parameter) {
  return layout.trainable(layout.place(parameter).unit);
}

bool any_trainable(const engine::Layout& layout) {
  return std::any_of(layout.units().begin(), layout.units().end(),
                     [](const engine::UnitSpec& unit) { return unit.trainable; });
}

std::string listing(std::vector<std::string> lines) {
  const std::size_t count = lines.size();
  if (count > 8) lines.resize(8);
  return fmt::format("{}{}", fmt::join(lines, "; "),
                     count > 8 ? fmt::format("; and {} more", count - 8) : "");
}

void expect_tensor(const engine::SafetensorsReader& reader, const std::string& name, Dtype type,
                   const std::vector<std::uint64_t>& shape) {
  const engine::StoredTensor& tensor = reader.tensor(name);
  if (tensor.dtype() != type || tensor.shape != shape)
    fail(ErrorCode::kCorrupt, "'{}': the tensor '{}' is {} [{}], {} of shape [{}] was expected",
         reader.path(), tensor.name, tensor.type, fmt::join(tensor.shape, ", "), name_of(type),
         fmt::join(shape, ", "));
}

std::vector<engine::UnitId> wider_first(const engine::Layout& layout) {
  std::vector<engine::UnitId> units(layout.units().size());
  std::iota(units.begin(), units.end(), engine::UnitId{0});
  std::ranges::stable_sort(units, std::greater(),
                           [&](engine::UnitId unit) { return size_of(layout.dtype(unit)); });
  return units;
}

// In the order of a checkpoint's files; of those that span units each.
std::vector<engine::ParameterId> as_saved(const engine::Layout& layout) {
  std::vector<engine::ParameterId> parameters;
  for (const engine::UnitId unit : wider_first(layout))
    for (engine::ParameterId id = layout.first_parameter(unit); id < layout.end_parameter(unit); ++id)
      parameters.push_back(id);
  return parameters;
}

// Those that have it, of an array that is not by elements.
std::vector<engine::TensorDeclaration> whole_tensors(const engine::Layout& layout,
                                                     const optim::Optimizer& optimizer,
                                                     const std::string& name) {
  std::vector<engine::TensorDeclaration> tensors;
  for (const engine::ParameterId id : as_saved(layout)) {
    if (!is_trainable(layout, id) || layout.spec(id).continues()) continue;
    for (const optim::WholeArray& array : optimizer.whole_state(layout.spec(id).shape))
      if (array.name == name)
        tensors.push_back({layout.spec(id).name, Dtype::kF32, {array.shape.begin(), array.shape.end()}});
  }
  return tensors;
}

// Of trainable parameters, those that have the array.
std::vector<bool> keepers(const engine::Layout& layout, const optim::Optimizer& optimizer,
                          std::size_t array) {
  std::vector<bool> keep;
  for (engine::ParameterId id = 0; id < layout.parameters(); ++id)
    keep.push_back(is_trainable(layout, id) && optimizer.keeps(array, engine::kind_of(layout.spec(id))));
  return keep;
}

bool any(const std::vector<bool>& all) { return std::find(all.begin(), all.end(), true) != all.end(); }

// The same optimizer may keep other arrays, as SGD with and without momentum does.
void check_state(const engine::CheckpointReader& checkpoint, const engine::Layout& layout,
                 const optim::Optimizer& optimizer) {
  std::set<std::string> wanted, found;
  const std::vector<optim::StateArray> state = optimizer.state();
  for (std::size_t array = 0; array < state.size(); ++array)
    if (any(keepers(layout, optimizer, array))) wanted.insert(engine::optimizer_file(state[array].name));
  for (const std::string& name : optimizer.whole_names())
    if (!whole_tensors(layout, optimizer, name).empty()) wanted.insert(engine::optimizer_file(name));
  for (const engine::CheckpointFile& file : checkpoint.files())
    if (file.name.starts_with("optimizer.") && file.name != engine::optimizer_file("master") &&
        !engine::is_scales_file(file.name))
      found.insert(file.name);
  if (wanted != found)
    fail(
        ErrorCode::kInvalidArgument,
        "'{}' holds the optimizer state [{}], and [{}] is needed; use the optimizer and the settings that it "
        "was made with",
        checkpoint.path(), fmt::join(found, ", "), fmt::join(wanted, ", "));
}

}  // namespace

bool is_float(const engine::StoredTensor& tensor) {
  const std::optional<Dtype> type = tensor.dtype();
  return type && sluice::is_float(*type);
}

void read_as_f32(Dtype type, std::size_t first, std::span<float> out, const ReadBytes& read) {
  const std::span<std::byte> bytes = std::as_writable_bytes(out);
  if (type == Dtype::kF32) return read(first * 4, bytes);
  read(first * 2, bytes.subspan(out.size() * 2));
  widen(type, out);
}

void read_as_f32(engine::SafetensorsReader& reader, const engine::StoredTensor& tensor, std::size_t first,
                 std::span<float> out) {
  read_as_f32(*tensor.dtype(), first, out,
              [&](std::size_t at, std::span<std::byte> into) { reader.read(tensor, at, into); });
}

HuggingFaceWeights::HuggingFaceWeights(offload::IoService& io, const std::string& folder,
                                       const ModelConfig& config, const engine::Layout& layout,
                                       engine::ReadAhead& ahead)
    : folder_(io, folder, ahead) {
  match(layout);
  if (config.tied_head) match_head(config);
}

void HuggingFaceWeights::match(const engine::Layout& layout) {
  std::vector<std::string> wrong;
  std::set<std::string> left;
  for (const std::string& name : folder_.names())
    if (!is_buffer(name)) left.insert(name);
  for (engine::ParameterId id = 0; id < layout.parameters(); ++id) {
    const engine::ParameterSpec& spec = layout.spec(id);
    const std::string name = folder_.find(spec.name) != nullptr ? spec.name : without_prefix(spec.name);
    const engine::StoredTensor* tensor = folder_.find(name);
    if (tensor == nullptr) {
      wrong.push_back(fmt::format("'{}' is missing", spec.name));
    } else if (!same_shape(*tensor, spec)) {
      wrong.push_back(fmt::format("'{}' has the shape [{}] in '{}', the configuration says [{}]", name,
                                  fmt::join(tensor->shape, ", "), folder_.file_of(name),
                                  fmt::join(spec.shape, ", ")));
    } else if (!is_float(*tensor)) {
      wrong.push_back(fmt::format("'{}' has the type {} in '{}'; F32, F16 and BF16 can be used", name,
                                  tensor->type, folder_.file_of(name)));
    }
    left.erase(name);
    names_.push_back(name);
  }
  for (const std::string& name : left) {
    if (name == "lm_head.weight") {
      left_over_.push_back(name);
    } else {
      wrong.push_back(fmt::format("'{}' is not a parameter of this model, and '{}' holds it", name,
                                  folder_.file_of(name)));
    }
  }
  if (!wrong.empty())
    fail(ErrorCode::kInvalidArgument, "the weights in '{}' do not fit its config.json: {}", folder_.path(),
         listing(wrong));
}

void HuggingFaceWeights::match_head(const ModelConfig& config) {
  if (left_over_.empty()) return;
  const char* embedding = config.family == Family::kGpt2 ? "wte.weight" : "embed_tokens.weight";
  const auto found = std::find_if(names_.begin(), names_.end(),
                                  [&](const std::string& n) { return n.ends_with(embedding); });
  ensure(found != names_.end(), "no parameter is named {}", embedding);
  const engine::StoredTensor& head = folder_.tensor(left_over_.front());
  const engine::StoredTensor& table = folder_.tensor(*found);
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
    const std::string& name = names_[id];
    read_as_f32(*folder_.tensor(name).dtype(), first, out,
                [&](std::size_t at, std::span<std::byte> into) { folder_.read(name, at, into); });
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

CheckpointValues::CheckpointValues(const engine::CheckpointReader& checkpoint, const engine::Layout& layout)
    : layout_(layout), parameters_(checkpoint.open_tensors(engine::kModelFile)) {
  check(*parameters_, [](engine::ParameterId) { return true; });
}

CheckpointValues::CheckpointValues(const engine::CheckpointReader& checkpoint, const engine::Layout& layout,
                                   const optim::Optimizer& optimizer)
    : CheckpointValues(checkpoint, layout) {
  if (!any_trainable(layout)) return;
  check_state(checkpoint, layout, optimizer);
  const std::string master = engine::optimizer_file("master");
  if (checkpoint.has(master)) masters_ = checkpoint.open_tensors(master);
  if (masters_ != nullptr) check(*masters_, [this](engine::ParameterId id) { return has_master(id); });
  for (const std::string& name : optimizer.whole_names()) {
    const auto tensors = whole_tensors(layout, optimizer, name);
    wholes_.push_back(tensors.empty() ? nullptr : checkpoint.open_tensors(engine::optimizer_file(name)));
    for (const engine::TensorDeclaration& tensor : tensors)
      expect_tensor(*wholes_.back(), tensor.name, Dtype::kF32, tensor.shape);
  }
  for (const optim::StateArray& array : optimizer.state()) {
    State& opened = state_.emplace_back();
    const std::vector<bool> keep = keepers(layout, optimizer, state_.size() - 1);
    if (!any(keep)) continue;
    opened.values = checkpoint.open_tensors(engine::optimizer_file(array.name));
    opened.map = array.map;
    const std::string scales = engine::scales_file(array.name);
    if (checkpoint.has(scales)) opened.scales = checkpoint.open_tensors(scales);
    if (opened.scales != nullptr)
      check_codes(opened, keep);
    else
      check(*opened.values, [&keep](engine::ParameterId id) { return keep[id]; });
  }
}

// Where a checkpoint has masters, an f32 parameter is its own.
bool CheckpointValues::has_master(engine::ParameterId parameter) const {
  return masters_ != nullptr && is_trainable(layout_, parameter) &&
         parameters_->tensor(layout_.spec(parameter).name).dtype() != Dtype::kF32;
}

void CheckpointValues::check(const engine::SafetensorsReader& reader,
                             const std::function<bool(engine::ParameterId)>& has) const {
  for (engine::ParameterId id = 0; id < layout_.parameters(); ++id) {
    if (!has(id)) continue;
    const engine::ParameterSpec& spec = layout_.spec(id);
    const engine::StoredTensor* tensor = reader.find(spec.name);
    if (tensor == nullptr)
      fail(ErrorCode::kInvalidArgument, "'{}' is of another model: it has no '{}'", reader.path(), spec.name);
    if (!same_shape(*tensor, spec) || !is_float(*tensor))
      fail(ErrorCode::kInvalidArgument,
           "'{}' is of another model: '{}' is {} [{}] in it, and a float of shape [{}] here", reader.path(),
           tensor->name, tensor->type, fmt::join(tensor->shape, ", "), fmt::join(spec.shape, ", "));
  }
}

void CheckpointValues::check_codes(const State& state, const std::vector<bool>& held) const {
  for (engine::ParameterId id = 0; id < layout_.parameters(); ++id) {
    if (!held[id]) continue;
    const engine::ParameterSpec& spec = layout_.spec(id);
    expect_tensor(*state.values, spec.name, Dtype::kU8, {spec.shape.begin(), spec.shape.end()});
    expect_tensor(*state.scales, spec.name, Dtype::kF32,
                  {divide_up(spec.whole_elements(), optim::kScaleBlock)});
  }
}

// A few blocks of codes at a time.
void CheckpointValues::read_codes(const State& state, const std::string& name, std::size_t first,
                                  std::span<float> out) {
  ensure(first % optim::kScaleBlock == 0, "codes are read from element {} on, in the middle of a block",
         first);
  std::array<float, 64> scales;
  std::array<std::uint8_t, scales.size() * optim::kScaleBlock> codes;
  for (std::size_t at = 0; at < out.size(); at += codes.size()) {
    const std::size_t n = std::min(codes.size(), out.size() - at), block = (first + at) / optim::kScaleBlock;
    const std::size_t blocks = divide_up(n, optim::kScaleBlock);
    state.values->read(state.values->tensor(name), first + at,
                       std::as_writable_bytes(std::span(codes).first(n)));
    state.scales->read(state.scales->tensor(name), block * sizeof(float),
                       std::as_writable_bytes(std::span(scales).first(blocks)));
    optim::decode(n, state.map, codes.data(), scales.data(), out.data() + at);
  }
}

engine::SafetensorsReader& CheckpointValues::values_of(engine::ParameterId parameter) {
  return has_master(parameter) ? *masters_ : *parameters_;
}

engine::UnitSource CheckpointValues::source() {
  engine::UnitSource source;
  source.values = [this](engine::ParameterId id, std::size_t first, std::span<float> out) {
    engine::SafetensorsReader& reader = values_of(id);
    read_as_f32(reader, reader.tensor(layout_.spec(id).name), layout_.spec(id).span_first + first, out);
  };
  if (!wholes_.empty())
    source.whole = [this](engine::ParameterId id, std::size_t array, std::span<float> out) {
      engine::SafetensorsReader& reader = *wholes_[array];
      reader.read(reader.tensor(layout_.spec(id).name), 0, std::as_writable_bytes(out));
    };
  if (state_.empty()) return source;
  source.state = [this](engine::ParameterId id, std::size_t array, std::size_t first, std::span<float> out) {
    const State& from = state_[array];
    const engine::ParameterSpec& spec = layout_.spec(id);
    if (from.scales != nullptr)
      read_codes(from, spec.name, spec.span_first + first, out);
    else
      read_as_f32(*from.values, from.values->tensor(spec.name), spec.span_first + first, out);
  };
  return source;
}

CheckpointTensors::CheckpointTensors(const engine::Layout& layout, const optim::Optimizer& optimizer)
    : units_(wider_first(layout)) {
  const engine::StateFormat format(layout, optimizer, engine::kChunkGrain);
  // Of the parameters that are wanted: each as it is declared. A span's values follow those of the one
  // before.
  const auto header = [&](const auto& wanted, const auto& declared) {
    std::vector<engine::TensorDeclaration> tensors;
    for (const engine::ParameterId id : as_saved(layout))
      if (!layout.spec(id).continues() && wanted(id)) tensors.push_back(declared(id));
    return engine::SafetensorsHeader(tensors);
  };
  const auto of_type = [&](Dtype type) {
    return [&layout, type](engine::ParameterId id) {
      const engine::ParameterSpec& spec = layout.spec(id);
      return engine::TensorDeclaration{spec.name, type, {spec.shape.begin(), spec.shape.end()}};
    };
  };
  const auto scales = [&](engine::ParameterId id) {
    const engine::ParameterSpec& spec = layout.spec(id);
    return engine::TensorDeclaration{
        spec.name, Dtype::kF32, {divide_up(spec.whole_elements(), optim::kScaleBlock)}};
  };
  const auto all = [](engine::ParameterId) { return true; };
  const auto has_master = [&](engine::ParameterId id) { return format.has_master(layout.place(id).unit); };
  headers_.push_back({engine::kModelFile, header(all, [&](engine::ParameterId id) {
                        return of_type(layout.dtype(layout.place(id).unit))(id);
                      })});
  if (!any_trainable(layout)) return;
  if (format.masters() > 0)
    headers_.push_back({engine::optimizer_file("master"), header(has_master, of_type(Dtype::kF32))});
  for (const optim::StateArray& array : optimizer.state()) {
    const std::vector<bool> keep = keepers(layout, optimizer, state_.size());
    state_.push_back(headers_.size());
    if (!any(keep)) continue;
    const auto kept = [&](engine::ParameterId id) { return keep[id]; };
    headers_.push_back({engine::optimizer_file(array.name), header(kept, of_type(array.type))});
    if (array.type == Dtype::kU8) headers_.push_back({engine::scales_file(array.name), header(kept, scales)});
  }
  for (const std::string& name : optimizer.whole_names()) {
    wholes_.push_back(headers_.size());
    const auto tensors = whole_tensors(layout, optimizer, name);
    if (!tensors.empty())
      headers_.push_back({engine::optimizer_file(name), engine::SafetensorsHeader(tensors)});
  }
}

std::vector<std::uint64_t> CheckpointTensors::file_bytes() const {
  std::vector<std::uint64_t> bytes;
  for (const Named& file : headers_) bytes.push_back(file.header.file_bytes());
  return bytes;
}

// Two blocks of each file, which are read in turn.
std::uint64_t CheckpointTensors::buffer_bytes() const {
  return std::max(engine::kStreamBuffer, 2 * engine::kStreamBlock * files());
}

void CheckpointTensors::open(engine::CheckpointWriter& writer) {
  writers_.clear();
  for (const Named& file : headers_) writers_.push_back(&writer.add_tensor_file(file.file, file.header));
}

engine::UnitSink CheckpointTensors::sink() {
  engine::UnitSink sink;
  sink.parameter = [this](engine::ParameterId, std::size_t, std::size_t count, ConstArray values) {
    writers_[0]->write({static_cast<const std::byte*>(values.data), count * size_of(values.type)});
  };
  sink.master = [this](engine::ParameterId, std::size_t, std::span<const float> values) {
    ensure(headers_.size() > 1 && headers_[1].file == engine::optimizer_file("master"),
           "a master was saved of a model that has none");
    writers_[1]->write(std::as_bytes(values));
  };
  sink.state = [this](engine::ParameterId, std::size_t array, std::size_t, std::size_t count,
                      ConstArray values, const float* scales) {
    const std::size_t file = state_[array];
    writers_[file]->write({static_cast<const std::byte*>(values.data), count * size_of(values.type)});
    if (scales != nullptr)
      writers_[file + 1]->write(std::as_bytes(std::span(scales, divide_up(count, optim::kScaleBlock))));
  };
  sink.whole = [this](engine::ParameterId, std::size_t array, std::span<const float> values) {
    writers_[wholes_[array]]->write(std::as_bytes(values));
  };
  return sink;
}

}  // namespace sluice::models
