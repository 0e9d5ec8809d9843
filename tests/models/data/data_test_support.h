#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "models/data/tokens.h"
#include "tests/thrown.h"

namespace sluice::models {

class DataTest : public ::testing::Test {
 protected:
  DataTest() {
    std::string name = (std::filesystem::temp_directory_path() / "sluice_data_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a folder for the test");
    folder_ = name;
  }
  ~DataTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string store(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << bytes;
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
  std::string folder_;
};

using Tokens = std::vector<std::int32_t>;

}  // namespace sluice::models
