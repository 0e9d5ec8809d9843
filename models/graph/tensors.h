#pragma once
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "models/graph/program.h"

// The arrays of one program while it is made: when each is read and written, and which may share their place.
namespace sluice::models {

using TensorId = std::size_t;

class Tensors {
 public:
  static constexpr std::ptrdiff_t kBefore = -1;  // holds content at the start
  static constexpr std::ptrdiff_t kAfter =
      std::numeric_limits<std::ptrdiff_t>::max();  // is read after the end

  TensorId add(std::size_t bytes, std::optional<Place> fixed = std::nullopt);
  void read(TensorId tensor, std::ptrdiff_t step);
  void write(TensorId tensor, std::ptrdiff_t step);
  // Becomes a copy of another tensor, which costs nothing where both get one place.
  void copy(TensorId from, TensorId to, std::ptrdiff_t step);
  // What step writes to `to` may lie where `from` lay, which it reads.
  void allow_in_place(TensorId from, TensorId to, std::ptrdiff_t step);

  // Gives tensors one place wherever no content is lost by it, then lays out the rest in the workspace.
  void assign(Program& program);
  Place place(TensorId tensor) const { return places_[group_[tensor]]; }

 private:
  struct Tensor {
    std::size_t bytes = 0;
    std::optional<Place> fixed;
    std::ptrdiff_t first = kAfter, last = kBefore;
    std::vector<std::ptrdiff_t> changes;  // steps that write something new
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
  void share_fixed_places();

  std::vector<Tensor> tensors_;
  std::vector<Sharing> sharings_;
  std::vector<std::size_t> group_;  // of each tensor: the id of its first member
  std::vector<Place> places_;       // of each group
};

}  // namespace sluice::models
