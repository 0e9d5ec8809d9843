#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "allocator/memory.h"
#include "bindings/cli/inspect.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/printable.h"
#include "engine/checkpoint/best_checkpoint.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/stored_floats.h"

namespace sluice::cli {
namespace {

// The objects needed to read a checkpoint's files.
struct Reading {
  std::unique_ptr<offload::IoService> io = offload::make_io_service({});
  allocator::Ledger ledger;
  allocator::Region buffer{ledger, allocator::Purpose::kCheckpoint, engine::kStreamBuffer};
  engine::ReadAhead ahead{buffer.bytes()};
};

struct Range {
  float least = std::numeric_limits<float>::infinity(), greatest = -std::numeric_limits<float>::infinity();
  std::uint64_t not_finite = 0;
};

Range range_of(engine::SafetensorsReader& reader, const engine::StoredTensor& tensor) {
  Range range;
  std::vector<float> piece(256 * kKiB);
  for (std::uint64_t at = 0; at < tensor.elements(); at += piece.size()) {
    const std::span<float> part =
        std::span(piece).first(std::min<std::uint64_t>(piece.size(), tensor.elements() - at));
    engine::read_as_f32(reader, tensor, at, part);
    for (const float value : part) {
      if (!std::isfinite(value)) {
        ++range.not_finite;
        continue;
      }
      range.least = std::min(range.least, value);
      range.greatest = std::max(range.greatest, value);
    }
  }
  return range;
}

bool has_float_values(const engine::StoredTensor& tensor) {
  const std::optional<Dtype> type = tensor.dtype();
  return tensor.elements() > 0 && type && is_float(*type);
}

void describe_tensor(engine::SafetensorsReader& reader, const engine::StoredTensor& tensor, bool values,
                     Report& report) {
  Json row = {
      {"name", tensor.name}, {"type", tensor.type}, {"shape", tensor.shape}, {"bytes", tensor.bytes()}};
  report.text += fmt::format("{:<52} {:<5} {:<18} {:>9}", printable(tensor.name), tensor.type,
                             fmt::format("[{}]", fmt::join(tensor.shape, ", ")), format_size(tensor.bytes()));
  if (values && has_float_values(tensor)) {
    const Range range = range_of(reader, tensor);
    row["not_finite"] = range.not_finite;
    if (range.least <= range.greatest) {
      row["least"] = range.least;
      row["greatest"] = range.greatest;
      report.text += fmt::format("  {:.6g} .. {:.6g}", range.least, range.greatest);
    }
    if (range.not_finite != 0) report.text += fmt::format("  {} values are not finite", range.not_finite);
  }
  report.text += '\n';
  report.json["tensors"].push_back(std::move(row));
}

}  // namespace

Report inspect_tensors(const std::string& path, bool values) {
  Reading reading;
  engine::SafetensorsReader reader(*reading.io, path, reading.ahead);
  Report report;
  report.json = {{"kind", "safetensors"}, {"path", path}, {"tensors", Json::array()}};
  report.json["metadata"] = reader.header().metadata();
  for (const engine::StoredTensor& tensor : reader.header().tensors())
    describe_tensor(reader, tensor, values, report);
  report.json["bytes"] = reader.header().file_bytes();
  report.text += fmt::format("{} tensors, {}\n", reader.header().tensors().size(),
                             format_size(reader.header().file_bytes()));
  return report;
}

Report inspect_checkpoint(const std::string& folder, bool verify) {
  Reading reading;
  const engine::CheckpointReader checkpoint(*reading.io, folder, reading.ahead);
  if (verify) checkpoint.verify();
  Report report;
  report.json = {
      {"kind", "checkpoint"},      {"path", folder},          {"version", engine::kCheckpointVersion},
      {"step", checkpoint.step()}, {"run", checkpoint.run()}, {"verified", verify},
      {"files", Json::array()}};
  report.text = fmt::format("checkpoint of step {} ({})\n", checkpoint.step(), folder);
  std::uint64_t bytes = 0;
  for (const engine::CheckpointFile& file : checkpoint.files()) {
    bytes += file.sum.bytes;
    report.json["files"].push_back(
        {{"name", file.name}, {"bytes", file.sum.bytes}, {"checksum", engine::to_hex(file.sum.checksum())}});
    report.text += fmt::format("  {:<36} {:>9}  {}\n", printable(file.name), format_size(file.sum.bytes),
                               engine::to_hex(file.sum.checksum()));
  }
  report.json["bytes"] = bytes;
  report.text += fmt::format(
      "  {} in all; {}\nrun: {}\n", format_size(bytes),
      verify ? "every byte is as it was written" : "lengths are right (--verify reads every byte)",
      checkpoint.run().dump(2));
  return report;
}

Report inspect_run(const std::string& out, bool verify) {
  const engine::CheckpointList list = engine::list_checkpoints(out);
  if (list.whole.empty() && list.broken.empty())
    fail(ErrorCode::kInvalidArgument, "the folder '{}' holds neither checkpoints nor safetensors", out);
  Report report;
  report.json = {{"kind", "run"},
                 {"path", out},
                 {"verified", verify},
                 {"checkpoints", Json::array()},
                 {"broken", Json::array()}};
  if (verify && !list.broken.empty())
    fail(ErrorCode::kCorrupt, "'{}' is not whole: {}", list.broken[0].path, list.broken[0].reason);
  const std::optional<engine::BestCheckpoint> best = engine::best_checkpoint(list);
  for (const auto& whole : list.whole) {
    if (verify) inspect_checkpoint(whole.path, true);
    const std::optional<double> loss = engine::validation_loss_of(whole.run);
    report.json["checkpoints"].push_back(
        {{"step", whole.step}, {"path", whole.path}, {"validation_loss", loss ? Json(*loss) : Json()}});
    report.text += fmt::format("step {:>8}  {}{}{}{}\n", whole.step, whole.path,
                               loss ? fmt::format("  validation loss {:.4f}", *loss) : "",
                               best && best->step == whole.step ? " (the best)" : "",
                               verify ? ": every byte is as it was written" : "");
  }
  report.json["best"] =
      best ? Json{{"step", best->step}, {"path", best->folder}, {"validation_loss", best->validation_loss}}
           : Json();
  for (const auto& broken : list.broken) {
    report.json["broken"].push_back({{"path", broken.path}, {"reason", broken.reason}});
    report.text += fmt::format("not whole: {}: {}\n", broken.path, broken.reason);
  }
  return report;
}

}  // namespace sluice::cli
