#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/layout/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "engine/ranks/packing.h"

namespace sluice::engine {

// The rows of the embeddings' gradients that have values in a step, for tables whose gradient ranks sum by
// rows (rows_of_tokens()). All other rows are 0 on every rank, and are not sent. Thread rule: one thread.
class TouchedRows {
 public:
  // The layout outlives it.
  TouchedRows(const Layout& layout, const Profile& profile, const RankOf& ranks);

  bool by_rows(ParameterId parameter, int use) const {
    return !rows_[parameter].empty() && use + 1 == layout_.spec(parameter).uses;
  }
  bool any_by_rows(UnitId unit, int use) const;
  void begin_step();
  // Returns the rows that are touched for the first time. REQUIRES: by_rows(parameter, its last use), and the
  // parameter has all of these rows.
  std::vector<std::int32_t> touch(ParameterId parameter, std::span<const std::int32_t> rows);
  // This rank's report of the unit's touched rows; and the union of the reports of all ranks.
  std::string own(UnitId unit) const;
  static std::string of_any(std::vector<std::string> of_ranks);
  // The parts of the gradient's buffer for that use that have values on any rank.
  Packing packing(UnitId unit, int use, const std::string& of_any) const;
  // Clears those rows of a gradient that only other ranks have touched. REQUIRES: as touch().
  void clear_others(ParameterId parameter, const std::string& of_any, float* gradient) const;

 private:
  std::size_t first_told(ParameterId parameter) const;

  const Layout& layout_;
  std::vector<std::string> rows_;  // by parameter: a bit for each row; empty: it is summed whole
};

}  // namespace sluice::engine
