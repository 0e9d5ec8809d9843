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

// In which rows of the embeddings' gradients a step has values: of tables whose gradient ranks sum by rows
// (rows_of_tokens()). In all other rows it is 0 on every rank, and these are not sent. Thread rule: one
// thread.
class TouchedRows {
 public:
  // The layout outlives it.
  TouchedRows(const Layout& layout, const Profile& profile, const RankOf& ranks);

  bool by_rows(ParameterId parameter, int use) const {
    return !rows_[parameter].empty() && use + 1 == layout_.spec(parameter).uses;
  }
  bool any_by_rows(UnitId unit, int use) const;
  void begin_step();
  // Returns those that are touched for the first time. REQUIRES: by_rows(parameter, its last use), and all
  // rows are the parameter's.
  std::vector<std::int32_t> touch(ParameterId parameter, std::span<const std::int32_t> rows);
  // What this rank tells the others of the unit's rows; and what is told of those that any has touched.
  std::string own(UnitId unit) const;
  static std::string of_any(std::vector<std::string> of_ranks);
  // What of the gradient's buffer for that use has values on any rank.
  Packing packing(UnitId unit, int use, const std::string& of_any) const;
  // Sets the rows of a gradient to 0 that others have touched alone. REQUIRES: as touch().
  void clear_others(ParameterId parameter, const std::string& of_any, float* gradient) const;

 private:
  std::size_t first_told(ParameterId parameter) const;

  const Layout& layout_;
  std::vector<std::string> rows_;  // by parameter: a bit for each row; empty: it is summed whole
};

}  // namespace sluice::engine
