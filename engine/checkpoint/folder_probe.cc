#include "engine/checkpoint/folder_probe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "core/descriptor.h"
#include "core/error.h"
#include "core/text_file.h"
#include "engine/checkpoint/safetensors.h"

namespace sluice::engine {

FolderProbe::FolderProbe(const std::string& folder)
    : name_("probe-" + random_name()),
      text_(random_name()),
      path_((std::filesystem::path(folder) / name_).string()) {
  write_text_file(path_, text_);
}

FolderProbe::~FolderProbe() { ::unlink(path_.c_str()); }

std::string why_not_shared(const std::string& folder, const std::string& name, const std::string& text) {
  if (!is_plain_file_name(name)) return fmt::format("'{}' is no name of a probe", name);
  const std::string path = (std::filesystem::path(folder) / name).string();
  Descriptor file;
  try {
    file = open_file(path, O_RDWR | O_NOFOLLOW);
  } catch (const Error& error) {
    return error.what();
  }
  std::string found(text.size() + 1, '\0');
  const ssize_t bytes = ::pread(file.get(), found.data(), found.size(), 0);
  if (bytes < 0) return fmt::format("'{}' cannot be read: {}", path, errno_text(errno));
  found.resize(static_cast<std::size_t>(bytes));
  return found == text ? "" : fmt::format("'{}' has another content", path);
}

}  // namespace sluice::engine
