#pragma once
#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "bindings/c/sluice.h"
#include "core/error.h"
#include "kernels/targets.h"

// Translation of errors at the C ABI. Private to this room.
namespace sluice::c {

// Thrown when a function of the caller asks to stop.
struct CallbackStopped {
  int value;
};

inline void stop_unless_zero(int result) {
  if (result != 0) throw CallbackStopped{result};
}

// Returns the status of the current exception, and stores its text for sluice_last_error().
sluice_status status_of_current_exception() noexcept;

template <class Action>
sluice_status guarded(Action&& action) noexcept {
  try {
    kernels::limit_targets();
    std::forward<Action>(action)();
    return SLUICE_OK;
  } catch (...) {
    return status_of_current_exception();
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) fail(ErrorCode::kInvalidArgument, "'{}' is NULL", name);
  return *pointer;
}

// Returns a copy of a versioned struct: the members that the caller's version has, and zeros for the rest.
template <class T>
T known_part(const T* given, const char* name) {
  const std::size_t size = required(given, name).size;
  if (size < sizeof(std::size_t) || size > 16 * sizeof(T))
    fail(ErrorCode::kInvalidArgument, "the size of '{}' is {}; set it with SLUICE_INIT", name, size);
  T known = {};
  std::memcpy(&known, given, std::min(size, sizeof(T)));
  return known;
}

// A versioned struct to be filled in, as far as the caller's version has its members.
template <class T>
class Result {
 public:
  // Checks the struct before any work is done. `given` may be NULL.
  Result(T* given, const char* name) : to_(given) {
    if (given != nullptr) known_part(given, name);
  }
  void give(const T& result) const {
    if (to_ == nullptr) return;
    const std::size_t size = to_->size;
    std::memcpy(to_, &result, std::min(size, sizeof(T)));
    to_->size = size;
  }

 private:
  T* to_;
};

char* new_text(const std::string& text);  // for sluice_text_destroy()

}  // namespace sluice::c
