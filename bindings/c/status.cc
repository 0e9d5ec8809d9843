#include "bindings/c/status.h"

#include <cstdlib>
#include <new>
#include <string>

#include "core/printable.h"

namespace sluice::c {
namespace {

thread_local std::string last_error;  // NOLINT: sluice_last_error() is per thread by contract

sluice_status status_of(ErrorCode code) {
  constexpr std::pair<ErrorCode, sluice_status> kStatuses[] = {
      {ErrorCode::kInvalidArgument, SLUICE_INVALID_ARGUMENT},
      {ErrorCode::kNotFound, SLUICE_NOT_FOUND},
      {ErrorCode::kBudget, SLUICE_BUDGET},
      {ErrorCode::kIo, SLUICE_IO},
      {ErrorCode::kCorrupt, SLUICE_CORRUPT},
      {ErrorCode::kNotFinite, SLUICE_NOT_FINITE},
      {ErrorCode::kState, SLUICE_STATE}};
  for (const auto& [known, status] : kStatuses)
    if (known == code) return status;
  return SLUICE_INTERNAL;
}

sluice_status keep(sluice_status status, const char* text) noexcept {
  try {
    last_error = printable(text, Lines::kKeep);
  } catch (...) {
    last_error.clear();
  }
  return status;
}

}  // namespace

sluice_status status_of_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return keep(status_of(error.code()), error.what());
  } catch (const CallbackStopped&) {
    return keep(SLUICE_CALLBACK, "a function of the caller stopped the call");
  } catch (const std::bad_alloc&) {
    return keep(SLUICE_BUDGET, "the system gave no memory");
  } catch (const std::exception& error) {
    return keep(SLUICE_INTERNAL, error.what());
  } catch (...) {
    return keep(SLUICE_INTERNAL, "an exception of an unknown type");
  }
}

char* new_text(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

}  // namespace sluice::c

const char* sluice_last_error(void) { return sluice::c::last_error.c_str(); }
uint32_t sluice_abi_version(void) { return SLUICE_ABI_VERSION; }
const char* sluice_version(void) { return SLUICE_VERSION; }
void sluice_text_destroy(char* text) { std::free(text); }
