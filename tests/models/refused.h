#pragma once
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace sluice::models::testing {

// The text with which a call was refused as invalid; a failure where it was not.
template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

}  // namespace sluice::models::testing
