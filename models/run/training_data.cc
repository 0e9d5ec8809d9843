#include "models/run/training_data.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/checksum.h"
#include "core/error.h"
#include "models/families/initialize.h"
#include "models/run/mesh_links.h"
#include "models/run/training_run.h"

namespace sluice::models {
namespace {

// These numbers are specified in docs/formats/tokens.md and checkpoint.md.
constexpr std::uint64_t kScanned = std::uint64_t{128} << 20, kSamples = 256, kAtOnce = 4096;  // in tokens

std::unique_ptr<TokenSource> open_for(const std::vector<std::string>& paths, const TrainSettings& settings,
                                      const ModelConfig& config) {
  std::unique_ptr<TokenSource> source = open_tokens(paths);
  if (source->vocabulary() && config.vocabulary != kByteVocabulary && settings.tokens != "bytes")
    fail(ErrorCode::kInvalidArgument,
         "'{}' is text, whose tokens are its {} bytes, and the model '{}' has a vocabulary of {}; {}",
         source->name(), kByteVocabulary, settings.model, config.vocabulary,
         begins_with_first_values(settings.model)
             ? "train it on bytes from scratch with --tokens bytes, or give token files (.bin) of its own "
               "tokenizer (python -m sluice tokenize makes them)"
             : "make token files (.bin) with its own tokenizer (python -m sluice tokenize, or as llm.c and "
               "nanoGPT do), and give those");
  source->set_vocabulary(config.vocabulary);
  return source;
}

// Reads `count` tokens from `first` on; read() checks each.
void read_through(TokenSource& source, std::uint64_t first, std::uint64_t count, Checksum* sum) {
  std::vector<std::int32_t> tokens(kAtOnce);
  for (std::uint64_t done = 0; done < count;) {
    const std::span<std::int32_t> part =
        std::span(tokens).first(std::min<std::uint64_t>(kAtOnce, count - done));
    source.read(first + done, part);
    if (sum != nullptr) sum->add(std::as_bytes(part));
    done += part.size();
  }
}

// A token outside the vocabulary is better found now than after a day. Text cannot have one.
void check_whole(TokenSource& source) {
  if (!source.vocabulary() && source.total() <= kScanned) read_through(source, 0, source.total(), nullptr);
}

std::string fingerprint_of(TokenSource& source) {
  Checksum sum;
  const std::uint64_t total = source.total();
  const bool whole = total <= kSamples * kAtOnce;
  for (std::uint64_t i = 0; i < (whole ? 1 : kSamples); ++i)
    read_through(source, whole ? 0 : (total - kAtOnce) / (kSamples - 1) * i, whole ? total : kAtOnce, &sum);
  return fmt::format("{:016x}", sum.value());
}

// A smaller step that does not fit is refused by the plan, which is more exact.
constexpr double kLargeStep = 16 * kMiB;

}  // namespace

std::uint64_t token_bytes(const TrainSettings& settings) {
  return 2 * sizeof(std::int32_t) * own_micro_batches(settings) * settings.batch * settings.length;
}

void check_token_bytes(const TrainSettings& settings) {
  const auto bytes = static_cast<double>(token_bytes(settings));
  if (bytes > kLargeStep && bytes > static_cast<double>(settings.memory) / 2)
    fail(ErrorCode::kBudget,
         "the tokens of one step ({} x {} x {}) alone take {:.0f} MiB, and --memory is {}; take a "
         "smaller --batch or --accumulate",
         settings.accumulate, settings.batch, settings.length, bytes / static_cast<double>(kMiB),
         format_size(settings.memory));
}

ModelConfig resolve_training_model(const TrainSettings& settings) {
  if (settings.tokens != "auto" && settings.tokens != "bytes")
    fail(ErrorCode::kInvalidArgument, "'{}' is not a kind of tokens; use auto or bytes", settings.tokens);
  if (settings.tokens == "auto") return resolve_model(settings.model);
  if (is_preset(settings.model)) return preset(settings.model, kByteVocabulary);
  const ModelConfig config = resolve_model(settings.model);
  if (config.vocabulary < kByteVocabulary)
    fail(
        ErrorCode::kInvalidArgument,
        "--tokens bytes needs a vocabulary of at least {}, and the config.json of '{}' states {}; state more",
        kByteVocabulary, settings.model, config.vocabulary);
  if (!begins_with_first_values(settings.model) && config.vocabulary != kByteVocabulary &&
      !learned_from(settings.model).bytes)
    fail(ErrorCode::kInvalidArgument,
         "--tokens bytes is for models that begin with first values, or were trained on bytes; '{}' has "
         "weights of other tokens. Make token files (.bin) with its tokenizer",
         settings.model);
  return config;
}

std::size_t own_micro_batches(const TrainSettings& settings) {
  return settings.accumulate / static_cast<std::size_t>(data_size(settings));
}

std::size_t first_micro_batch(const TrainSettings& settings) {
  return own_micro_batches(settings) * static_cast<std::size_t>(data_rank(settings, settings.ranks.rank));
}

TrainingData::TrainingData(const TrainSettings& settings, const ModelConfig& config)
    : batch_(settings.batch),
      length_(settings.length),
      first_micro_batch_(first_micro_batch(settings)),
      source_(open_for(settings.data, settings, config)) {
  check_token_bytes(settings);
  check_whole(*source_);
  fingerprint_ = fingerprint_of(*source_);
  const bool named = settings.validation.has_value();
  const WindowSplit split = split_windows(*source_, length_, named ? 0.0 : settings.held_out);
  sampler_.emplace(split.train, settings.seed);
  if (named) {
    validation_source_ = open_for({*settings.validation}, settings, config);
    check_whole(*validation_source_);
    validation_fingerprint_ = fingerprint_of(*validation_source_);
    const WindowSplit all = split_windows(*validation_source_, length_, 0.0);
    validation_sampler_.emplace(all.train, settings.seed, Sampler::Order::kInOrder);
  } else if (split.held_out.count > 0) {
    validation_fingerprint_ = fingerprint_;
    validation_sampler_.emplace(split.held_out, settings.seed, Sampler::Order::kInOrder);
  }
  rows_ = row_parts(sequence_cut(settings), batch_, length_);
  whole_tokens_.resize(batch_ * length_);
  whole_targets_.resize(batch_ * length_);
  tokens_.resize(own_micro_batches(settings) * row_count(rows_));
  targets_.resize(tokens_.size());
  micro_batches_.resize(own_micro_batches(settings));
}

MicroBatch TrainingData::fill(TokenSource& source, const Sampler& sampler, std::uint64_t first,
                              std::size_t slot) {
  fill_batch(source, sampler, first, length_, whole_tokens_, whole_targets_);
  const std::size_t count = row_count(rows_);
  const std::span<std::int32_t> tokens = std::span(tokens_).subspan(slot * count, count);
  const std::span<std::int32_t> targets = std::span(targets_).subspan(slot * count, count);
  for (const RowPart& part : rows_) {
    const auto copy = [&](const std::vector<std::int32_t>& from, std::span<std::int32_t> to) {
      std::ranges::copy(std::span(from).subspan(part.whole_row, part.rows), to.subspan(part.row).begin());
    };
    copy(whole_tokens_, tokens);
    copy(whole_targets_, targets);
  }
  return {tokens, targets, first};
}

std::span<const MicroBatch> TrainingData::training(std::uint64_t next) {
  for (std::size_t k = 0; k < micro_batches_.size(); ++k)
    micro_batches_[k] = fill(*source_, *sampler_, next + (first_micro_batch_ + k) * batch_, k);
  return micro_batches_;
}

Json TrainingData::validation_identity() const {
  return {{"data_fingerprint", validation_fingerprint_}, {"windows", validation_sampler_->windows()}};
}

const MicroBatch& TrainingData::validation(std::uint64_t index) {
  TokenSource& source = validation_source_ ? *validation_source_ : *source_;
  return micro_batches_[0] = fill(source, *validation_sampler_, index * batch_, 0);
}

}  // namespace sluice::models
