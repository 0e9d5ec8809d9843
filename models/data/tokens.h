#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

// Where training text comes from: see docs/formats/tokens.md.
namespace sluice::models {

inline constexpr std::size_t kByteVocabulary = 256;  // of text, whose tokens are its bytes

// A sequence of tokens of known length. Thread rule: one thread at a time.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::uint64_t total() const = 0;
  // The size of the tokens' vocabulary: 256 for bytes, nothing where the format does not state it.
  virtual std::optional<std::uint64_t> vocabulary() const = 0;
  // Reads the tokens first .. first + out.size() - 1. Throws Error(kInvalidArgument) where they pass the end,
  // or where a token is outside the vocabulary, with its file and position; Error(kIo).
  virtual void read(std::uint64_t first, std::span<std::int32_t> out) = 0;
  // States the vocabulary of the model that will take the tokens: from then on read() refuses others. Throws
  // Error(kInvalidArgument), with what to do, where it is smaller than the source's.
  virtual void set_vocabulary(std::uint64_t size) = 0;
  virtual const std::string& name() const = 0;  // for messages
};

// Opens text files, folders of text, or token files (.bin of llm.c or nanoGPT) as one sequence. Throws
// Error(kNotFound | kIo), and Error(kInvalidArgument) for what is empty, no text, or of another length than
// its header states, and where text and token files are mixed.
std::unique_ptr<TokenSource> open_tokens(const std::vector<std::string>& paths);

}  // namespace sluice::models
