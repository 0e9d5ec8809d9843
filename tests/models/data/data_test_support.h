#pragma once
#include "models/data/tokens.h"
#include "testing.h"
#include "tests/temporary_folder.h"
#include "tests/thrown.h"

namespace sluice::models {

class DataTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string store(const std::string& name, const std::string& bytes) const {
    folder_.put(name, bytes);
    return path(name);
  }
  template <class T>
  static std::string raw(const std::vector<T>& values) {
    std::string bytes(values.size() * sizeof(T), '\0');
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  static std::vector<std::int32_t> read(TokenSource& source, std::uint64_t first, std::size_t count) {
    std::vector<std::int32_t> tokens(count);
    source.read(first, tokens);
    return tokens;
  }
  TemporaryFolder folder_;
};

using Tokens = std::vector<std::int32_t>;

}  // namespace sluice::models
