#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "allocator/memory.h"
#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/json.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run_id.h"
#include "engine/checkpoint/stored_floats.h"
#include "engine/ranks/agreement.h"
#include "engine/saving/checkpoint_values.h"

namespace sluice::c {
namespace {

namespace fs = std::filesystem;
constexpr const char* kSaving = "whether a checkpoint is saved";
using engine::ParameterId;

allocator::Region stream_buffer(sluice_engine& e) {
  return {e.ledger, allocator::Purpose::kCheckpoint, e.planned.checkpoint_buffers};
}

void check_tensor(const engine::StoredTensor& tensor, const engine::ParameterSpec& spec,
                  const std::string& path) {
  const bool scalar = spec.elements() == 1 && tensor.shape.empty();
  if (!scalar && !std::equal(tensor.shape.begin(), tensor.shape.end(), spec.shape.begin(), spec.shape.end()))
    fail(ErrorCode::kInvalidArgument, "'{}' has the shape [{}] in '{}', and [{}] in the model", spec.name,
         fmt::join(tensor.shape, ", "), path, fmt::join(spec.shape, ", "));
  if (!engine::is_float(tensor))
    fail(ErrorCode::kInvalidArgument, "'{}' has the type {} in '{}'; F32, F16 and BF16 can be used",
         spec.name, tensor.type, path);
}

// Calls `use` with the checkpoint at a path: the path itself, or the newest whole checkpoint in that folder.
void with_checkpoint(sluice_engine& e, const std::string& path,
                     const std::function<void(const engine::CheckpointReader&)>& use) {
  std::optional<std::string> folder = path;
  if (!fs::exists(fs::path(path) / engine::kManifestFile)) folder = engine::newest_checkpoint(path);
  if (!folder) fail(ErrorCode::kNotFound, "'{}' is not a checkpoint, and holds none", path);
  const auto buffer = stream_buffer(e);
  engine::ReadAhead ahead(buffer.bytes(), &e.threads);
  try {
    use(engine::CheckpointReader(*e.planned.io, *folder, ahead));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    engine::fail_damaged(error, *folder);
  }
}

// Returns the layout of the checkpoint's files.
const engine::Layout& model_of(const sluice_engine& e) {
  return e.planned.section == nullptr ? e.engine->layout() : *e.planned.model;
}

// Returns the number of updates of each parameter that has another one than the number of steps.
Json own_steps_of(const engine::Engine& engine) {
  Json steps = Json::object();
  for (ParameterId p = 0; p < engine.layout().parameters(); ++p)
    if (engine.layout().trainable(engine.layout().location(p).unit) && engine.steps(p) != engine.steps())
      steps[engine.layout().spec(p).name] = engine.steps(p);
  return steps;
}

// The same for the parameters of all sections, collected from their ranks.
Json steps_of(const sluice_engine& e) {
  Json steps = own_steps_of(*e.engine);
  if (e.planned.section == nullptr) return steps;
  for (const std::string& told :
       engine::exchange(*e.ranks.communicator(), "how often parameters were updated", steps.dump()))
    steps.update(Json::parse(told));
  return steps;
}

// Throws where another optimizer made the checkpoint. Checkpoints without a name are AdamW's.
void check_optimizer(const engine::CheckpointReader& checkpoint, const optim::Optimizer& optimizer) {
  const Json made = checkpoint.run().value("optimizer", Json::object());
  const std::string name = made.value("name", "adamw");
  if (name != optimizer.name())
    fail(ErrorCode::kInvalidArgument,
         "'{}' was saved in a training by the optimizer '{}', and this engine has '{}'; give the engine or "
         "the wrapped model '{}', or load the parameters alone, by load_values() of '{}'",
         checkpoint.path(), name, optimizer.name(), name,
         (fs::path(checkpoint.path()) / engine::kModelFile).string());
}

// Throws where the checkpoint is of another model or optimizer.
engine::CheckpointValues values_of(const sluice_engine& e, const engine::CheckpointReader& checkpoint) {
  check_optimizer(checkpoint, *e.planned.optimizer);
  return {checkpoint, model_of(e), *e.planned.optimizer};
}

void set_steps(engine::Engine& engine, const engine::CheckpointReader& checkpoint) {
  engine.set_steps(checkpoint.step());
  const Json steps = checkpoint.run().value("parameter_steps", Json::object());
  for (ParameterId p = 0; p < engine.layout().parameters(); ++p)
    if (const auto found = steps.find(engine.layout().spec(p).name); found != steps.end())
      engine.set_steps(p, found->get<std::uint64_t>());
}

// A checkpoint has no gradients, so it cannot be saved or loaded during a step.
void check_between_steps(const sluice_engine& e, const char* verb) {
  if (e.engine->in_step())
    fail(ErrorCode::kState, "a checkpoint is {} in the middle of a step; finish or abandon the step", verb);
}

// Checkpoints of another run must not be mixed with this engine's, nor be pruned with them.
void check_folder(const std::string& out, std::uint64_t step) {
  if (engine::read_run_id(out))
    fail(ErrorCode::kInvalidArgument,
         "'{}' holds the checkpoints of a run of 'sluice train'; name another folder", out);
  const engine::CheckpointList list = engine::list_checkpoints(out);
  if (!list.whole.empty() && list.whole.back().step > step)
    fail(ErrorCode::kInvalidArgument,
         "'{}' holds a checkpoint of step {}, and this engine is at step {}; name another folder, or remove "
         "the later ones",
         out, list.whole.back().step, step);
}

std::string write_tensors(sluice_engine& e, const std::string& out, const Json& run,
                          std::span<const engine::OwnFile> own, comm::Communicator* communicator) {
  const engine::Layout& layout = model_of(e);
  std::optional<engine::SectionOfFiles> section;
  if (e.planned.section != nullptr) {
    section.emplace(engine::SectionOfFiles{
        *e.planned.section, engine::partitions_of(layout, *e.planned.optimizer, *e.planned.section,
                                                  e.planned.plan, *communicator)});
  }
  return engine::CheckpointTensors(layout, *e.planned.optimizer)
      .save(*e.engine, *e.planned.io, e.ledger,
            {.out = out, .step = e.engine->steps(), .buffer_bytes = e.planned.checkpoint_buffers}, run, own,
            communicator, section ? &*section : nullptr);
}

// Returns why sections cannot save there, the same on all ranks; empty: they can.
std::string why_not_seen(const sluice_engine& e, const std::string& out) {
  if (e.planned.section == nullptr) return "";
  const std::string why_not = engine::find_shared_folder(*e.ranks.communicator(), out, out + "/.").why_not;
  return why_not.empty() ? ""
                         : why_not +
                               ", where each stage of a pipeline writes its part of a checkpoint; name "
                               "a folder that all ranks see";
}

// Takes part in a save of rank 0.
std::string save_with_first(sluice_engine& e, const std::string& out, comm::Communicator& communicator) {
  const Json refused =
      Json::parse(engine::exchange(communicator, kSaving, "{}", [&] { e.engine->serve_state(); })[0]);
  if (refused.contains("text"))
    fail(static_cast<ErrorCode>(refused.at("code").get<int>()), "rank 0 could not save: {}",
         refused.at("text").get<std::string>());
  if (const std::string why_not = why_not_seen(e, out); !why_not.empty())
    fail(ErrorCode::kInvalidArgument, "{}", why_not);
  steps_of(e);
  return write_tensors(e, out, {}, {}, &communicator);
}

std::string save_as_first(sluice_engine& e, const std::string& out, std::uint64_t keep,
                          std::span<const engine::OwnFile> own, const std::function<void()>& begins = {}) {
  if (out.empty()) fail(ErrorCode::kInvalidArgument, "'out' is empty; name a folder");
  e.engine->settle();
  const engine::RunLock lock(out);
  check_folder(out, e.engine->steps());
  engine::remove_leftovers(out);
  if (begins) begins();
  Json run = {{"optimizer", e.planned.optimizer->settings()}, {"parameter_steps", steps_of(e)}};
  run["optimizer"]["name"] = e.planned.optimizer->name();
  std::string folder = write_tensors(e, out, run, own, e.ranks.communicator());
  if (keep > 0) engine::prune(out, keep);
  return folder;
}

// An argument that rank 0 refuses is refused on all ranks. A failure of rank 0 later on ends the work of all,
// since they are writing then.
std::string save(sluice_engine& e, const std::string& out, std::uint64_t keep,
                 std::span<const engine::OwnFile> own) {
  comm::Communicator* const communicator = e.ranks.communicator();
  if (communicator == nullptr || communicator->rank() > 0) check_between_steps(e, "saved");
  if (communicator == nullptr) return save_as_first(e, out, keep, own);
  if (communicator->rank() > 0) return save_with_first(e, out, *communicator);
  bool begun = false, refused = false;
  try {
    check_between_steps(e, "saved");
    return save_as_first(e, out, keep, own, [&] {
      engine::exchange(*communicator, kSaving, "{}");
      begun = true;
      const std::string why_not = why_not_seen(e, out);
      refused = !why_not.empty();
      if (refused) fail(ErrorCode::kInvalidArgument, "{}", why_not);
    });
  } catch (const std::exception& error) {  // the other ranks wait for this one
    const auto* const known = dynamic_cast<const Error*>(&error);
    const ErrorCode code = known == nullptr ? ErrorCode::kInternal : known->code();
    if (begun && !refused) communicator->fail(error.what());
    if (!begun)
      engine::exchange(*communicator, kSaving,
                       Json{{"code", static_cast<int>(code)}, {"text", std::string(error.what())}}.dump());
    throw;
  }
}

std::vector<engine::OwnFile> own_files(const sluice_file* files, std::size_t count) {
  std::vector<engine::OwnFile> own;
  for (std::size_t f = 0; f < count; ++f) {
    const sluice_file& given = (&required(files, "files"))[f];
    engine::OwnFile& file = own.emplace_back(engine::OwnFile{&required(given.name, "a file's name"), {}});
    for (std::size_t i = 0; i < given.piece_count; ++i) {
      const sluice_piece& piece = (&required(given.pieces, "a file's pieces"))[i];
      const auto* const data = static_cast<const std::byte*>(piece.data);
      file.pieces.emplace_back(piece.bytes > 0 ? &required(data, "a piece's data") : nullptr, piece.bytes);
    }
  }
  return own;
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room
namespace engine = sluice::engine;

sluice_status sluice_engine_set_values(sluice_engine* handle, uint32_t unit, sluice_read_values values,
                                       void* context) {
  return with_engine(handle, [&](sluice_engine& e) {
    if (values == nullptr) sluice::fail(sluice::ErrorCode::kInvalidArgument, "'values' is NULL");
    engine::UnitSource source;
    source.values = [&](engine::ParameterId p, std::size_t first, std::span<float> out) {
      call_back(e, values, context, p, first, out.data(), out.size());
    };
    e.engine->load(unit_of(e, unit), source);
  });
}

sluice_status sluice_engine_get_values(sluice_engine* handle, uint32_t unit, sluice_write_values values,
                                       void* context) {
  return with_engine(handle, [&](sluice_engine& e) {
    if (values == nullptr) sluice::fail(sluice::ErrorCode::kInvalidArgument, "'values' is NULL");
    engine::UnitSink sink;
    sink.values = [&](engine::ParameterId p, std::size_t first, std::span<const float> part) {
      call_back(e, values, context, p, first, part.data(), part.size());
    };
    e.engine->save(unit_of(e, unit), sink);
  });
}

sluice_status sluice_engine_load_values(sluice_engine* handle, const char* path) {
  return with_engine(handle, [&](sluice_engine& e) {
    const auto buffer = stream_buffer(e);
    engine::ReadAhead ahead(buffer.bytes(), &e.threads);
    engine::SafetensorsFolder tensors(*e.planned.io, &required(path, "path"), ahead);
    const engine::Layout& layout = e.engine->layout();
    for (engine::ParameterId p = 0; p < layout.parameters(); ++p)
      check_tensor(tensors.tensor(layout.spec(p).name), layout.spec(p), path);
    engine::UnitSource source;
    source.values = [&](engine::ParameterId p, std::size_t first, std::span<float> out) {
      engine::read_as_f32(tensors, layout.spec(p).name, layout.spec(p).span_first + first, out);
    };
    e.engine->load_all(source);
  });
}

sluice_status sluice_engine_save(sluice_engine* handle, const char* out, uint64_t keep, char** path) {
  return sluice_engine_save_with_files(handle, out, keep, nullptr, 0, path);
}

sluice_status sluice_engine_save_with_files(sluice_engine* handle, const char* out, uint64_t keep,
                                            const sluice_file* files, size_t file_count, char** path) {
  return with_engine(handle, [&](sluice_engine& e) {
    const std::string folder = save(e, &required(out, "out"), keep, own_files(files, file_count));
    if (path != nullptr) *path = new_text(folder);
  });
}

sluice_status sluice_engine_find_checkpoint(sluice_engine* handle, const char* path, char** folder) {
  return with_engine(handle, [&](sluice_engine& e) {
    with_checkpoint(e, &required(path, "path"), [&](const engine::CheckpointReader& checkpoint) {
      values_of(e, checkpoint);
      required(folder, "folder") = new_text(checkpoint.path());
    });
  });
}

sluice_status sluice_engine_checkpoint_file(sluice_engine* handle, const char* path, const char* name,
                                            char** file) {
  return with_engine(handle, [&](sluice_engine& e) {
    const std::string wanted = &required(name, "name");
    with_checkpoint(e, &required(path, "path"), [&](const engine::CheckpointReader& checkpoint) {
      const auto found = checkpoint.verified(wanted);
      required(file, "file") = found ? new_text(*found) : nullptr;
    });
  });
}

sluice_status sluice_engine_load(sluice_engine* handle, const char* path) {
  return with_engine(handle, [&](sluice_engine& e) {
    check_between_steps(e, "loaded");
    with_checkpoint(e, &required(path, "path"), [&](const engine::CheckpointReader& checkpoint) {
      engine::CheckpointValues values = values_of(e, checkpoint);
      const engine::Section* const section = e.planned.section.get();
      e.engine->load_all(section == nullptr ? values.source() : of_section(values.source(), *section));
      e.engine->settle();
      set_steps(*e.engine, checkpoint);
    });
  });
}
