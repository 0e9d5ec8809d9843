#include "core/error.h"

#include <system_error>

namespace sluice {

int exit_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kNotFound:
    case ErrorCode::kCorrupt:
    case ErrorCode::kNotFinite:
      return 2;
    case ErrorCode::kBudget:
      return 3;
    default:
      return 1;
  }
}

std::string_view name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kNotFound:
      return "not_found";
    case ErrorCode::kBudget:
      return "budget";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kNotFinite:
      return "not_finite";
    case ErrorCode::kState:
      return "state";
    case ErrorCode::kInternal:
      break;
  }
  return "internal";
}

std::string errno_text(int error_number) {
  return fmt::format("{} ({})", std::generic_category().message(error_number), error_number);
}

}  // namespace sluice
