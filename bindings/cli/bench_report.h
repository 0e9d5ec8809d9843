#pragma once
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "core/json.h"

// The reports of benchmarks, in the form of docs/formats/bench.md.
namespace sluice::cli {

enum class BenchUnit { kBytesPerSecond, kSeconds };

struct BenchRow {
  std::string name;
  BenchUnit unit = BenchUnit::kBytesPerSecond;
  double reached = 0, limit = 0;
  std::string limit_is;
  Json more = Json::object();  // further fields of the row
};

struct BenchReport {
  std::string bench;
  int threads = 1;
  Json settings = Json::object();
  std::vector<BenchRow> rows;
  std::vector<std::string> notes;
};
double median(std::vector<double> values);  // REQUIRES: values is not empty
double ratio_of(const BenchRow& row);       // reached / limit, as a share
Json to_json(const BenchReport& report);
std::string to_text(const BenchReport& report);

// A progress line on standard error that is rewritten in place, if that is a terminal. The destructor erases
// it.
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

// A measurement. Each round returns its results, always the same number of them.
struct BenchWork {
  std::string name;
  std::function<std::vector<double>()> round;
};
// Runs all works in turn until `seconds` are over, at least three times each, after a warm-up round. Returns
// the medians by work and result.
std::vector<std::vector<double>> medians_in_turn(const std::vector<BenchWork>& works, double seconds,
                                                 BenchProgress& progress);

// Throws Error(kBudget), with the remedy, where less memory is free.
void require_free_memory(std::uint64_t bytes, const std::string& remedy);
// Throws Error(kInvalidArgument) for a time that is too short or too long for measuring.
void check_seconds(double seconds);

}  // namespace sluice::cli
