#include "core/error.h"

#include <array>
#include <system_error>

namespace sluice {
namespace {

struct Row {
  std::string_view name;
  int exit_status;
};
// They are in the order of ErrorCode.
constexpr std::array kRows = {
    Row{"invalid_argument", 2}, Row{"not_found", 2},  Row{"budget", 3}, Row{"io", 1},
    Row{"corrupt", 2},          Row{"not_finite", 2}, Row{"state", 1},  Row{"internal", 1}};

}  // namespace

int exit_status(ErrorCode code) { return kRows[static_cast<std::size_t>(code)].exit_status; }
std::string_view name_of(ErrorCode code) { return kRows[static_cast<std::size_t>(code)].name; }

std::string errno_text(int error_number) {
  return fmt::format("{} ({})", std::generic_category().message(error_number), error_number);
}

}  // namespace sluice
