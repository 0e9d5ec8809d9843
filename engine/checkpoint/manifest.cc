#include <charconv>
#include <set>

#include "core/error.h"
#include "engine/checkpoint/checkpoint.h"

namespace sluice::engine {
namespace {

constexpr std::string_view kFormat = "sluice checkpoint";
constexpr std::string_view kBeforeSum = ",\n  \"checksum\": \"";
constexpr std::string_view kAfterSum = "\"\n}\n";
constexpr std::size_t kDigits = 16;
constexpr std::size_t kEnding = kBeforeSum.size() + kDigits + kAfterSum.size();

std::string checksum_of(std::string_view text) { return to_hex(checksum(std::as_bytes(std::span(text)))); }

// The part of the text that the checksum covers.
std::string_view checked_body(std::string_view text, std::string_view source) {
  const auto body = text.substr(0, text.size() < kEnding ? 0 : text.size() - kEnding);
  const auto ending = text.substr(body.size());
  if (text.size() < kEnding || !ending.starts_with(kBeforeSum) || !ending.ends_with(kAfterSum))
    fail(ErrorCode::kCorrupt,
         "'{}' does not end as a checkpoint's manifest ends: it was cut, edited, or is something else",
         source);
  const auto stated = ending.substr(kBeforeSum.size(), kDigits);
  if (const std::string found = checksum_of(body); found != stated)
    fail(ErrorCode::kCorrupt, "'{}' is damaged: its checksum is {}, and {} was written", source, found,
         stated);
  return body;
}

std::uint64_t from_hex(std::string_view digits, std::string_view source) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc() || end != digits.data() + digits.size())
    fail(ErrorCode::kCorrupt, "'{}' holds '{}' where a checksum is expected", source, digits);
  return value;
}

std::string blocks_text(const FileSum& sum) {
  std::string text;
  for (const std::uint64_t block : sum.blocks) text += to_hex(block);
  return text;
}

FileSum parse_sum(const Json& file, const std::string& name, std::string_view source) {
  FileSum sum;
  sum.bytes = json_field<std::uint64_t>(file, "bytes", source);
  const auto blocks = json_field<std::string>(file, "blocks", source);
  if (blocks.size() != divide_up(sum.bytes, kStreamBlock) * kDigits)
    fail(ErrorCode::kCorrupt, "'{}' has {} digits of block checksums for the {} bytes of '{}'", source,
         blocks.size(), sum.bytes, name);
  for (std::size_t i = 0; i < blocks.size(); i += kDigits)
    sum.blocks.push_back(from_hex(std::string_view(blocks).substr(i, kDigits), source));
  if (to_hex(sum.checksum()) != json_field<std::string>(file, "checksum", source))
    fail(ErrorCode::kCorrupt, "'{}': the checksum of '{}' is not that of its blocks", source, name);
  return sum;
}

void check_version(const Json& json, std::string_view source) {
  if (!json.is_object() || !json.contains("format") || json["format"] != kFormat)
    fail(ErrorCode::kCorrupt, "'{}' is not the manifest of a checkpoint", source);
  const auto version = json_field<int>(json, "version", source);
  if (version != kCheckpointVersion)
    fail(ErrorCode::kInvalidArgument, "'{}' has the format version {}, and this program reads version {}",
         source, version, kCheckpointVersion);
  const auto block = json_field<std::uint64_t>(json, "block_bytes", source);
  if (block != kStreamBlock)
    fail(ErrorCode::kCorrupt, "'{}' has checksum blocks of {} bytes, and version {} has {}", source, block,
         version, kStreamBlock);
}

}  // namespace

std::string Manifest::to_text() const {
  Json json = {{"format", kFormat},           {"version", kCheckpointVersion}, {"step", step},
               {"block_bytes", kStreamBlock}, {"files", Json::array()},        {"run", run}};
  for (const CheckpointFile& file : files)
    json["files"].push_back({{"name", file.name},
                             {"bytes", file.sum.bytes},
                             {"checksum", to_hex(file.sum.checksum())},
                             {"blocks", blocks_text(file.sum)}});
  try {
    std::string text = json.dump(2);
    text.resize(text.size() - 2);  // "\n}"
    const std::string sum = checksum_of(text);
    return text.append(kBeforeSum).append(sum).append(kAfterSum);
  } catch (const Json::exception& error) {
    fail(ErrorCode::kInvalidArgument, "the manifest of step {} cannot be written: {}", step, error.what());
  }
}

Manifest Manifest::parse(const std::string& text, std::string_view source) {
  const std::string body = std::string(checked_body(text, source)) + "\n}";
  const Json json = parse_json(body, source);
  check_version(json, source);
  Manifest manifest;
  manifest.step = json_field<std::uint64_t>(json, "step", source);
  manifest.run = json_field<Json>(json, "run", source);
  std::set<std::string> names;
  for (const Json& file : json_field<std::vector<Json>>(json, "files", source)) {
    const auto name = json_field<std::string>(file, "name", source);
    if (!is_plain_file_name(name) || name == kManifestFile)
      fail(ErrorCode::kCorrupt, "'{}' lists '{}', which is not a plain file name", source, name);
    if (!names.insert(name).second) fail(ErrorCode::kCorrupt, "'{}' lists '{}' twice", source, name);
    manifest.files.push_back({name, parse_sum(file, name, source)});
  }
  return manifest;
}

}  // namespace sluice::engine
