#pragma once
#include <utility>

#include "core/error.h"

namespace sluice::engine {

// Thrown by a call that changed nothing, so that the engine goes on. Any other exception leaves the engine
// failed.
class Refusal : public Error {
 public:
  using Error::Error;
};

template <class... Arguments>
[[noreturn]] void refuse(ErrorCode code, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  throw Refusal(code, fmt::format(text, std::forward<Arguments>(arguments)...));
}

}  // namespace sluice::engine
