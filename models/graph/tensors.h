#pragma once
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "models/graph/program.h"

// Plans the memory of one program: tracks when each array is read and written, and which arrays may share a
// location.
namespace sluice::models {

using TensorId = std::size_t;

class Tensors {
 public:
  static constexpr std::ptrdiff_t kBefore = -1;                                         // live at the start
  static constexpr std::ptrdiff_t kAfter = std::numeric_limits<std::ptrdiff_t>::max();  // read after the end

  TensorId add(std::size_t bytes, std::optional<Location> fixed = std::nullopt);
  void read(TensorId tensor, std::ptrdiff_t step);
  void write(TensorId tensor, std::ptrdiff_t step);
  // `to` becomes a copy of `from`, at no cost where both get one location.
  void copy(TensorId from, TensorId to, std::ptrdiff_t step);
  // The step may write `to` in the place of `from`, which it reads.
  void allow_in_place(TensorId from, TensorId to, std::ptrdiff_t step);

  // Lets tensors share a location wherever no live content is lost, then lays out the rest in the workspace.
  void assign(Program& program);
  Location location(TensorId tensor) const { return locations_[group_[tensor]]; }

 private:
  struct Tensor {
    std::size_t bytes = 0;
    std::optional<Location> fixed;
    std::ptrdiff_t first = kAfter, last = kBefore;
    std::vector<std::ptrdiff_t> changes;  // steps that write new contents
  };
  struct Sharing {
    TensorId from, to;
    std::ptrdiff_t step;
    bool copied;
  };

  void touch(TensorId tensor, std::ptrdiff_t step);
  bool allowed(TensorId over, TensorId written, std::ptrdiff_t step) const;
  bool destroys(TensorId writer, TensorId other) const;
  bool can_share(TensorId a, TensorId b) const;
  void share(TensorId a, TensorId b);
  std::vector<TensorId> members(std::size_t group) const;
  void share_fixed_locations();

  std::vector<Tensor> tensors_;
  std::vector<Sharing> sharings_;
  std::vector<std::size_t> group_;   // by tensor: the id of its group's first member
  std::vector<Location> locations_;  // by group
};

}  // namespace sluice::models
