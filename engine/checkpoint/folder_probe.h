#pragma once
#include <string>

namespace sluice::engine {

// A file with a random name and a random text, by which processes find whether they see the same folder.
// Thread rule: one thread at a time.
class FolderProbe {
 public:
  // Writes the file. Throws Error(kIo).
  explicit FolderProbe(const std::string& folder);
  ~FolderProbe();  // removes it
  FolderProbe(const FolderProbe&) = delete;
  FolderProbe& operator=(const FolderProbe&) = delete;

  const std::string& name() const { return name_; }
  const std::string& text() const { return text_; }

 private:
  std::string name_, text_, path_;
};

// Returns why this process cannot write the files of that folder: it does not find the file with that text
// there, or may not write it. Empty: it can.
std::string why_not_shared(const std::string& folder, const std::string& name, const std::string& text);

}  // namespace sluice::engine
