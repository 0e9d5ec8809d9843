#include "engine/saving/checkpoint_values.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/checkpoint/stored_floats.h"
#include "engine/layout/kind.h"
#include "engine/layout/state_format.h"
#include "engine/ranks/agreement.h"

namespace sluice::engine {
namespace {

bool is_trainable(const Layout& layout, ParameterId parameter) {
  return layout.trainable(layout.location(parameter).unit);
}

bool any_trainable(const Layout& layout) {
  return std::any_of(layout.units().begin(), layout.units().end(),
                     [](const UnitSpec& unit) { return unit.trainable; });
}

void expect_tensor(const SafetensorsReader& reader, const std::string& name, Dtype type,
                   const std::vector<std::uint64_t>& shape) {
  const StoredTensor& tensor = reader.tensor(name);
  if (tensor.dtype() != type || tensor.shape != shape)
    fail(ErrorCode::kCorrupt, "'{}': the tensor '{}' is {} [{}], {} of shape [{}] was expected",
         reader.path(), tensor.name, tensor.type, fmt::join(tensor.shape, ", "), name_of(type),
         fmt::join(shape, ", "));
}

std::vector<UnitId> wider_first(const Layout& layout) {
  std::vector<UnitId> units(layout.units().size());
  std::iota(units.begin(), units.end(), UnitId{0});
  std::ranges::stable_sort(units, std::greater(), [&](UnitId unit) { return size_of(layout.dtype(unit)); });
  return units;
}

// Returns the parameters in the order of a checkpoint's files, with every span of those that span units.
std::vector<ParameterId> as_saved(const Layout& layout) {
  std::vector<ParameterId> parameters;
  for (const UnitId unit : wider_first(layout))
    for (ParameterId id = layout.first_parameter(unit); id < layout.end_parameter(unit); ++id)
      parameters.push_back(id);
  return parameters;
}

// Returns the tensors of a whole array: one for each parameter that has it.
std::vector<TensorDeclaration> whole_tensors(const Layout& layout, const optim::Optimizer& optimizer,
                                             const std::string& name) {
  std::vector<TensorDeclaration> tensors;
  for (const ParameterId id : as_saved(layout)) {
    if (!is_trainable(layout, id) || layout.spec(id).continues()) continue;
    for (const optim::WholeArray& array : optimizer.whole_state(layout.spec(id).shape))
      if (array.name == name)
        tensors.push_back({layout.spec(id).name, Dtype::kF32, {array.shape.begin(), array.shape.end()}});
  }
  return tensors;
}

std::vector<bool> keepers(const Layout& layout, const optim::Optimizer& optimizer, std::size_t array) {
  std::vector<bool> keep;
  for (ParameterId id = 0; id < layout.parameters(); ++id)
    keep.push_back(is_trainable(layout, id) && optimizer.keeps(array, kind_of(layout.spec(id))));
  return keep;
}

bool any(const std::vector<bool>& all) { return std::find(all.begin(), all.end(), true) != all.end(); }

std::string list_of(const std::set<std::string>& files) {
  return files.empty() ? "nothing" : fmt::format("{}", fmt::join(files, ", "));
}

[[noreturn]] void fail_for_model(const std::string& path, const std::string& difference) {
  fail(ErrorCode::kInvalidArgument,
       "'{}' is of another model than this one: {}; build the model as it was when the checkpoint was saved",
       path, difference);
}

// The same optimizer keeps other arrays with other settings, as SGD does with and without momentum.
void check_state(const CheckpointReader& checkpoint, const Layout& layout,
                 const optim::Optimizer& optimizer) {
  std::set<std::string> wanted, found;
  const std::vector<optim::StateArray> state = optimizer.state();
  for (std::size_t array = 0; array < state.size(); ++array)
    if (any(keepers(layout, optimizer, array))) wanted.insert(optimizer_file(state[array].name));
  for (const std::string& name : optimizer.whole_names())
    if (!whole_tensors(layout, optimizer, name).empty()) wanted.insert(optimizer_file(name));
  for (const CheckpointFile& file : checkpoint.files())
    if (file.name.starts_with("optimizer.") && file.name != optimizer_file("master") &&
        !is_scales_file(file.name))
      found.insert(file.name);
  if (wanted != found)
    fail(
        ErrorCode::kInvalidArgument,
        "'{}' holds of optimizer state {}, and {} needs {}; use the optimizer and the settings with which it "
        "was saved",
        checkpoint.path(), list_of(found), optimizer.name(), list_of(wanted));
}

}  // namespace

CheckpointValues::CheckpointValues(const CheckpointReader& checkpoint, const Layout& layout)
    : layout_(layout), parameters_(checkpoint.open_tensors(kModelFile)) {
  check(*parameters_, [](ParameterId) { return true; });
  std::set<std::string_view> names;
  for (ParameterId id = 0; id < layout.parameters(); ++id) names.insert(layout.spec(id).name);
  for (const StoredTensor& tensor : parameters_->header().tensors())
    if (!names.contains(tensor.name))
      fail_for_model(parameters_->path(), fmt::format("it has '{}', too", tensor.name));
}

CheckpointValues::CheckpointValues(const CheckpointReader& checkpoint, const Layout& layout,
                                   const optim::Optimizer& optimizer)
    : CheckpointValues(checkpoint, layout) {
  if (!any_trainable(layout)) return;
  check_state(checkpoint, layout, optimizer);
  const std::string master = optimizer_file("master");
  if (checkpoint.has(master)) masters_ = checkpoint.open_tensors(master);
  if (masters_ != nullptr) check(*masters_, [this](ParameterId id) { return has_master(id); });
  for (const std::string& name : optimizer.whole_names()) {
    const auto tensors = whole_tensors(layout, optimizer, name);
    wholes_.push_back(tensors.empty() ? nullptr : checkpoint.open_tensors(optimizer_file(name)));
    for (const TensorDeclaration& tensor : tensors)
      expect_tensor(*wholes_.back(), tensor.name, Dtype::kF32, tensor.shape);
  }
  for (const optim::StateArray& array : optimizer.state()) {
    State& opened = state_.emplace_back();
    const std::vector<bool> keep = keepers(layout, optimizer, state_.size() - 1);
    if (!any(keep)) continue;
    opened.values = checkpoint.open_tensors(optimizer_file(array.name));
    opened.map = array.map;
    const std::string scales = scales_file(array.name);
    if (checkpoint.has(scales)) opened.scales = checkpoint.open_tensors(scales);
    if (opened.scales != nullptr)
      check_codes(opened, keep);
    else
      check(*opened.values, [&keep](ParameterId id) { return keep[id]; });
  }
}

// An f32 parameter is its own master, even in a checkpoint that has masters.
bool CheckpointValues::has_master(ParameterId parameter) const {
  return masters_ != nullptr && is_trainable(layout_, parameter) &&
         parameters_->tensor(layout_.spec(parameter).name).dtype() != Dtype::kF32;
}

void CheckpointValues::check(const SafetensorsReader& reader,
                             const std::function<bool(ParameterId)>& has) const {
  for (ParameterId id = 0; id < layout_.parameters(); ++id) {
    if (!has(id)) continue;
    const ParameterSpec& spec = layout_.spec(id);
    const StoredTensor* tensor = reader.find(spec.name);
    if (tensor == nullptr && &reader != parameters_.get())
      fail(ErrorCode::kInvalidArgument,
           "'{}' has nothing of '{}', which is trained here; freeze what was frozen when the checkpoint was "
           "saved",
           reader.path(), spec.name);
    if (tensor == nullptr) fail_for_model(reader.path(), fmt::format("it has no '{}'", spec.name));
    if (!has_shape(*tensor, spec.shape) || !is_float(*tensor))
      fail_for_model(reader.path(),
                     fmt::format("'{}' is {} [{}] in it, and a float of shape [{}] here", tensor->name,
                                 tensor->type, fmt::join(tensor->shape, ", "), fmt::join(spec.shape, ", ")));
  }
}

void CheckpointValues::check_codes(const State& state, const std::vector<bool>& held) const {
  for (ParameterId id = 0; id < layout_.parameters(); ++id) {
    if (!held[id]) continue;
    const ParameterSpec& spec = layout_.spec(id);
    expect_tensor(*state.values, spec.name, Dtype::kU8, {spec.shape.begin(), spec.shape.end()});
    expect_tensor(*state.scales, spec.name, Dtype::kF32,
                  {divide_up(spec.whole_elements(), optim::kScaleBlock)});
  }
}

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

SafetensorsReader& CheckpointValues::values_of(ParameterId parameter) {
  return has_master(parameter) ? *masters_ : *parameters_;
}

UnitSource CheckpointValues::source() {
  UnitSource source;
  source.values = [this](ParameterId id, std::size_t first, std::span<float> out) {
    SafetensorsReader& reader = values_of(id);
    read_as_f32(reader, reader.tensor(layout_.spec(id).name), layout_.spec(id).span_first + first, out);
  };
  if (!wholes_.empty())
    source.whole = [this](ParameterId id, std::size_t array, std::span<float> out) {
      SafetensorsReader& reader = *wholes_[array];
      reader.read(reader.tensor(layout_.spec(id).name), 0, std::as_writable_bytes(out));
    };
  if (state_.empty()) return source;
  source.state = [this](ParameterId id, std::size_t array, std::size_t first, std::span<float> out) {
    const State& from = state_[array];
    const ParameterSpec& spec = layout_.spec(id);
    if (from.scales != nullptr)
      read_codes(from, spec.name, spec.span_first + first, out);
    else
      read_as_f32(*from.values, from.values->tensor(spec.name), spec.span_first + first, out);
  };
  return source;
}

CheckpointTensors::CheckpointTensors(const Layout& layout, const optim::Optimizer& optimizer)
    : layout_(layout), units_(wider_first(layout)) {
  const StateFormat format(layout, optimizer, kChunkGrain);
  // A span's values follow those of the span before, in one tensor.
  const auto header = [&](const auto& wanted, const auto& declared) {
    std::vector<TensorDeclaration> tensors;
    for (const ParameterId id : as_saved(layout))
      if (!layout.spec(id).continues() && wanted(id)) tensors.push_back(declared(id));
    return SafetensorsHeader(tensors);
  };
  const auto of_type = [&](Dtype type) {
    return [&layout, type](ParameterId id) {
      const ParameterSpec& spec = layout.spec(id);
      return TensorDeclaration{spec.name, type, {spec.shape.begin(), spec.shape.end()}};
    };
  };
  const auto scales = [&](ParameterId id) {
    const ParameterSpec& spec = layout.spec(id);
    return TensorDeclaration{spec.name, Dtype::kF32, {divide_up(spec.whole_elements(), optim::kScaleBlock)}};
  };
  const auto all = [](ParameterId) { return true; };
  const auto has_master = [&](ParameterId id) { return format.has_master(layout.location(id).unit); };
  using Of = TensorFile::Of;
  files_.push_back(
      {kModelFile,
       header(all, [&](ParameterId id) { return of_type(layout.dtype(layout.location(id).unit))(id); }),
       Of::kParameters});
  if (!any_trainable(layout)) return;
  if (format.masters() > 0)
    files_.push_back({optimizer_file("master"), header(has_master, of_type(Dtype::kF32)), Of::kState});
  for (const optim::StateArray& array : optimizer.state()) {
    const std::vector<bool> keep = keepers(layout, optimizer, state_.size());
    state_.push_back(files_.size());
    if (!any(keep)) continue;
    const auto kept = [&](ParameterId id) { return keep[id]; };
    files_.push_back({optimizer_file(array.name), header(kept, of_type(array.type)), Of::kState});
    if (array.type == Dtype::kU8)
      files_.push_back({scales_file(array.name), header(kept, scales), Of::kScales});
  }
  for (const std::string& name : optimizer.whole_names()) {
    wholes_.push_back(files_.size());
    const auto tensors = whole_tensors(layout, optimizer, name);
    if (!tensors.empty()) files_.push_back({optimizer_file(name), SafetensorsHeader(tensors), Of::kWholes});
  }
}

std::vector<std::uint64_t> CheckpointTensors::file_bytes() const {
  std::vector<std::uint64_t> bytes;
  for (const TensorFile& file : files_) bytes.push_back(file.header.file_bytes());
  return bytes;
}

// Files are read in turn, so that each needs room for two blocks.
std::uint64_t CheckpointTensors::buffer_bytes(int ranks) const {
  const std::uint64_t reading = std::max(kStreamBuffer, 2 * kStreamBlock * files_.size());
  return ranks == 1 ? reading : std::max(reading, SharedFiles::buffer_bytes(files_.size()));
}

std::string CheckpointTensors::save(Engine& engine, offload::IoService& io, allocator::Ledger& ledger,
                                    const Options& options, const Json& run, std::span<const OwnFile> own,
                                    comm::Communicator* communicator, const SectionOfFiles* section) {
  const std::string folder = write_own(engine, io, ledger, options, run, own, communicator, section);
  if (communicator == nullptr) return folder;
  try {
    return exchange(*communicator, "the checkpoint that was written", folder,
                    [&] { engine.serve_ranks(); })[0];
  } catch (const Error& error) {
    // The checkpoint is whole. The next call of all ranks, which cannot succeed either, reports the error.
    if (communicator->rank() == 0) return folder;
    fail(error.code(), "{}; whether rank 0 had written the checkpoint of step {} by then, it says itself",
         error.what(), options.step);
  }
}

std::string CheckpointTensors::write_own(Engine& engine, offload::IoService& io, allocator::Ledger& ledger,
                                         const Options& options, const Json& run,
                                         std::span<const OwnFile> own, comm::Communicator* communicator,
                                         const SectionOfFiles* section) {
  const bool is_first = communicator == nullptr || communicator->rank() == 0;
  std::optional<CheckpointWriter> writer;
  try {
    std::vector<std::uint64_t> bytes = file_bytes();
    for (const OwnFile& file : own) bytes.push_back(file.bytes());
    check_file_limit(bytes);
    if (is_first) {
      writer.emplace(io, CheckpointWriter::Options{options.out, options.step, bytes_needed(bytes)});
      for (const OwnFile& file : own) writer->add_file(file);
    }
    comm::Communicator* together = communicator;
    SharedFolder folder{is_first ? writer->partial() : "", ""};
    if (communicator != nullptr) folder = find_shared_folder(*communicator, options.out, folder.path);
    if (!folder.why_not.empty()) {
      if (section != nullptr) fail(ErrorCode::kInvalidArgument, "{}", folder.why_not);
      if (is_first) log().info("{}: it sends its part to rank 0", folder.why_not);
      together = nullptr;
    }
    std::string written;
    if (is_first || together != nullptr)
      written = write_files(engine, io, ledger, folder.path, options.buffer_bytes, run,
                            is_first ? &*writer : nullptr, together, section);
    else
      send(engine);
    shared_.reset();
    return written;
  } catch (const std::exception& error) {
    // Before the files are destroyed, which waits for messages of other ranks.
    if (communicator != nullptr) communicator->fail(error.what());
    shared_.reset();
    throw;
  }
}

std::string CheckpointTensors::write_files(Engine& engine, offload::IoService& io, allocator::Ledger& ledger,
                                           const std::string& folder, std::size_t buffer_bytes,
                                           const Json& run, CheckpointWriter* writer,
                                           comm::Communicator* communicator, const SectionOfFiles* section) {
  const auto wait_for_all = [communicator](const char* what) {
    if (communicator != nullptr) exchange(*communicator, what, {});
  };
  shared_.emplace(
      [&engine, section](UnitId unit) {
        return section == nullptr ? engine.partition(unit) : section->partitions[unit];
      },
      layout_, files_, units_, communicator);
  for (const TensorFile& file : files_) {
    if (writer == nullptr) break;
    if (communicator != nullptr) communicator->report_work();  // reserving the space of a file may take long
    writer->add_tensor_file(file.name, file.header.file_bytes());
  }
  wait_for_all("the files of the checkpoint");  // exist
  shared_->open(io, ledger, folder, buffer_bytes);
  // Before that, a rank 0 that fails, and so removes them, would make another rank report missing files.
  wait_for_all("the open files of the checkpoint");
  const UnitSink files = section == nullptr ? sink() : of_section(sink(), section->section);
  for (const UnitId unit : units_) {
    const std::optional<UnitId> own = section == nullptr ? unit : section->section.own(unit);
    if (communicator == nullptr)
      engine.save(unit, files);
    else if (own)
      engine.save_own(*own, files, shared_->wanted(unit));
  }
  std::vector<FileSum> sums = shared_->finish();
  if (writer == nullptr) return "";
  for (std::size_t i = 0; i < files_.size(); ++i)
    writer->finish_tensor_file(files_[i].name, std::move(sums[i]));
  return writer->commit(run);
}

// This rank's part in what rank 0 writes of all ranks.
void CheckpointTensors::send(Engine& engine) {
  for (const UnitId unit : units_)
    if (!engine.partition(unit).shards.empty()) engine.save(unit, {});
}

void CheckpointTensors::write(std::size_t file, ParameterId parameter, std::size_t first, std::size_t count,
                              ConstArray values) {
  const std::string& name = layout_.spec(parameter).name;
  const StoredTensor* const tensor = files_[file].header.find(name);
  ensure(tensor != nullptr, "'{}' was saved to '{}', which has no such tensor", name, files_[file].name);
  const std::size_t size = size_of(values.type);
  shared_->put(file, *tensor, first * size, {static_cast<const std::byte*>(values.data), count * size});
}

UnitSink CheckpointTensors::sink() {
  UnitSink sink;
  const auto logical = [this](ParameterId parameter, std::size_t first) {
    return layout_.spec(parameter).span_first + first;
  };
  sink.parameter = [=, this](ParameterId p, std::size_t first, std::size_t count, ConstArray values) {
    write(0, p, logical(p, first), count, values);
  };
  sink.master = [=, this](ParameterId p, std::size_t first, std::span<const float> values) {
    ensure(files_.size() > 1 && files_[1].name == optimizer_file("master"),
           "a master was saved of a model that has none");
    write(1, p, logical(p, first), values.size(), {values.data(), Dtype::kF32});
  };
  sink.state = [=, this](ParameterId p, std::size_t array, std::size_t first, std::size_t count,
                         ConstArray values, const float* scales) {
    const std::size_t file = state_[array];
    write(file, p, logical(p, first), count, values);
    if (scales != nullptr)
      write(file + 1, p, logical(p, first) / optim::kScaleBlock, divide_up(count, optim::kScaleBlock),
            {scales, Dtype::kF32});
  };
  sink.whole = [this](ParameterId p, std::size_t array, std::span<const float> values) {
    write(wholes_[array], p, 0, values.size(), {values.data(), Dtype::kF32});
  };
  return sink;
}

}  // namespace sluice::engine
