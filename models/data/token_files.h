#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sluice::models {

// Tokens of one width that lie one after another in a file.
struct TokenFile {
  std::string path;
  std::uint64_t header = 0;  // bytes before the first token
  std::uint64_t count = 0;   // tokens
  unsigned width = 1;        // bytes of a token: 1, 2 or 4
};

struct TextFolder {
  std::vector<TokenFile> files;
  std::uint64_t skipped = 0;
};

// Whether the path is that of a token file: by its name.
bool is_token_file_name(const std::string& path);
// llm.c, or else nanoGPT. Throws Error(kInvalidArgument | kNotFound | kIo).
TokenFile find_token_file(const std::string& path);
// A text file that was named by the user: what is no text is an error. Throws as above.
TokenFile find_text_file(const std::string& path);
// All text below a folder, by path.
TextFolder find_text_folder(const std::string& path);

}  // namespace sluice::models
