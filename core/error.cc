#include "core/error.h"

#include <system_error>

namespace sluice {

int exit_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kNotFound:
    case ErrorCode::kCorrupt:
    case ErrorCode::kNotFinite: return 2;
    case ErrorCode::kBudget: return 3;
    default: return 1;
  }
}

std::string errno_text(int error_number) {
  return fmt::format("{} ({})", std::generic_category().message(error_number), error_number);
}

}  // namespace sluice
