#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sluice::models {

// A file with an array of tokens of one width.
struct TokenFile {
  std::string path;
  std::uint64_t header = 0;  // bytes before the first token
  std::uint64_t count = 0;   // number of tokens
  unsigned width = 1;        // bytes of a token: 1, 2 or 4
};

// Whether a file's name is that of a token file.
bool is_token_file_name(const std::string& path);
// Recognizes a token file of llm.c, or else of nanoGPT. Throws Error(kInvalidArgument | kNotFound | kIo).
TokenFile find_token_file(const std::string& path);
// Takes a text file that the user has named. Throws as find_token_file(); a file that is no text is an error.
TokenFile find_text_file(const std::string& path);
// Finds all text files below a folder, ordered by path.
std::vector<TokenFile> find_text_folder(const std::string& path);

}  // namespace sluice::models
