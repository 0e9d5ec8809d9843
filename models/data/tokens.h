#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

// Sources of training text: see docs/formats/tokens.md.
namespace sluice::models {

inline constexpr std::size_t kByteVocabulary = 256;  // the vocabulary of text, whose tokens are its bytes

// A sequence of tokens of known length. Thread rule: one thread at a time.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::uint64_t total() const = 0;
  // Returns the size of the vocabulary: 256 for bytes; nothing where the format does not state it.
  virtual std::optional<std::uint64_t> vocabulary() const = 0;
  // Reads the tokens first ... first + out.size() - 1. Throws Error(kIo), and Error(kInvalidArgument) for a
  // range past the end, or, with file and position, for a token outside the vocabulary.
  virtual void read(std::uint64_t first, std::span<std::int32_t> out) = 0;
  // Sets the vocabulary of the model that will take the tokens: from then on read() refuses others. Throws
  // Error(kInvalidArgument), with what to do, where it is smaller than the source's.
  virtual void set_vocabulary(std::uint64_t size) = 0;
  virtual const std::string& name() const = 0;  // for error messages
};

// Opens text files, folders of text, or token files (.bin of llm.c or nanoGPT) as one sequence. Throws
// Error(kNotFound | kIo), and Error(kInvalidArgument) for a file that is empty, no text, or of another length
// than its header states, and where text and token files are mixed.
std::unique_ptr<TokenSource> open_tokens(const std::vector<std::string>& paths);

}  // namespace sluice::models
