#include "core/error.h"

#include <array>
#include <cerrno>
#include <system_error>

namespace sluice {
namespace {

struct CodeRow {
  std::string_view name;
  int exit_status;
};
// In the order of ErrorCode.
constexpr std::array kCodeRows = {
    CodeRow{"invalid_argument", 2}, CodeRow{"not_found", 2},  CodeRow{"budget", 3}, CodeRow{"io", 1},
    CodeRow{"corrupt", 2},          CodeRow{"not_finite", 2}, CodeRow{"state", 1},  CodeRow{"internal", 1}};

}  // namespace

int exit_status(ErrorCode code) { return kCodeRows[static_cast<std::size_t>(code)].exit_status; }
std::string_view name_of(ErrorCode code) { return kCodeRows[static_cast<std::size_t>(code)].name; }

std::string errno_text(int error_number) {
  return fmt::format("{} ({})", std::generic_category().message(error_number), error_number);
}

std::string_view errno_advice(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return "; the disk is full: free space on it";
    case EFBIG:
      return "; the file would pass a limit: see 'ulimit -f' and the file system's largest file size";
    case EIO:
      return "; the device reports a failure: see the kernel's log";
    default:
      return "";
  }
}

}  // namespace sluice
