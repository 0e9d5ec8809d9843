#pragma once
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "core/json.h"

// What the benches print: see docs/formats/bench.md.
namespace sluice::cli {

enum class BenchUnit { kBytesPerSecond, kSeconds };

struct BenchRow {
  std::string name;
  BenchUnit unit = BenchUnit::kBytesPerSecond;
  double reached = 0, limit = 0;
  std::string limit_is;
  Json more = Json::object();  // further fields of its row
};

struct BenchReport {
  std::string bench;
  int threads = 1;
  Json settings = Json::object();
  std::vector<BenchRow> rows;
  std::vector<std::string> notes;
};
double ratio_of(const BenchRow& row);  // the share of the limit that was reached
Json to_json(const BenchReport& report);
std::string to_text(const BenchReport& report);

// One line on the standard error stream that is rewritten, where that is a terminal; it is gone with its
// owner.
class BenchProgress {
 public:
  BenchProgress();
  ~BenchProgress();
  BenchProgress(const BenchProgress&) = delete;
  BenchProgress& operator=(const BenchProgress&) = delete;
  void show(const std::string& text);

 private:
  bool shown_ = false, terminal_;
};

// A measurement: what one round of it found, always as many numbers.
struct BenchWork {
  std::string name;
  std::function<std::vector<double>()> round;
};
// Runs all works in turn until `seconds` are over, at least three times each after a first time that does not
// count. Returns the medians, by work and number.
std::vector<std::vector<double>> medians_in_turn(const std::vector<BenchWork>& works, double seconds,
                                                 BenchProgress& progress);

// Throws Error(kBudget) where less memory is free.
void require_free_memory(std::uint64_t bytes, const std::string& remedy);
// Throws Error(kInvalidArgument) for what is no time to measure in.
void check_seconds(double seconds);

}  // namespace sluice::cli
