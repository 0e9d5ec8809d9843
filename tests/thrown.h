#pragma once
#include "core/error.h"
#include "testing.h"

// Catches errors, so that tests can look at them.
namespace sluice {

struct Thrown {
  ErrorCode code;
  std::string text;
};
inline Thrown thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  ADD_FAILURE() << "no error was thrown";
  return {ErrorCode::kInternal, ""};
}

// The text with which a call was refused as invalid; a failure where it was not.
inline std::string message_of(const std::function<void()>& call) {
  const Thrown thrown = thrown_by(call);
  EXPECT_EQ(thrown.code, ErrorCode::kInvalidArgument) << thrown.text;
  return thrown.text;
}

// Matches an error of this code whose text contains all parts.
template <class Call>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, Call&& call) {
  const Thrown thrown = thrown_by(call);
  EXPECT_EQ(static_cast<int>(thrown.code), static_cast<int>(code)) << thrown.text;
  for (const std::string& part : parts)
    EXPECT_NE(thrown.text.find(part), std::string::npos) << "'" << part << "' is not in: " << thrown.text;
}

}  // namespace sluice
