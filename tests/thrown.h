#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/error.h"

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
  try {
    call();
    ADD_FAILURE() << "no error was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in: " << error.what();
  }
}

}  // namespace sluice
