#include "models/graph/tensors.h"

#include <algorithm>

#include "core/error.h"

namespace sluice::models {

TensorId Tensors::add(std::size_t bytes, std::optional<Location> fixed) {
  tensors_.push_back({bytes, fixed, kAfter, kBefore, {}});
  group_.push_back(group_.size());
  return tensors_.size() - 1;
}

void Tensors::touch(TensorId tensor, std::ptrdiff_t step) {
  tensors_[tensor].first = std::min(tensors_[tensor].first, step);
  tensors_[tensor].last = std::max(tensors_[tensor].last, step);
}

void Tensors::read(TensorId tensor, std::ptrdiff_t step) { touch(tensor, step); }

void Tensors::write(TensorId tensor, std::ptrdiff_t step) {
  touch(tensor, step);
  tensors_[tensor].changes.push_back(step);
}

void Tensors::copy(TensorId from, TensorId to, std::ptrdiff_t step) {
  touch(from, step);
  touch(to, step);
  sharings_.push_back({from, to, step, true});
}

void Tensors::allow_in_place(TensorId from, TensorId to, std::ptrdiff_t step) {
  sharings_.push_back({from, to, step, false});
}

bool Tensors::allowed(TensorId over, TensorId written, std::ptrdiff_t step) const {
  return std::ranges::any_of(sharings_, [&](const Sharing& sharing) {
    return sharing.from == over && sharing.to == written && sharing.step == step;
  });
}

// Whether a write to one tensor would overwrite contents of another one that are still to be read at the same
// location.
bool Tensors::destroys(TensorId writer, TensorId other) const {
  const Tensor& read = tensors_[other];
  return std::ranges::any_of(tensors_[writer].changes, [&](std::ptrdiff_t step) {
    if (read.first > step || read.last < step) return false;
    return read.last > step || !allowed(other, writer, step);
  });
}

bool Tensors::can_share(TensorId a, TensorId b) const {
  const auto left = members(group_[a]), right = members(group_[b]);
  for (const TensorId one : left) {
    for (const TensorId two : right) {
      const auto &first = tensors_[one], &second = tensors_[two];
      if (first.bytes != second.bytes) return false;
      if (first.fixed && second.fixed && *first.fixed != *second.fixed) return false;
      if (destroys(one, two) || destroys(two, one)) return false;
    }
  }
  return true;
}

void Tensors::share(TensorId a, TensorId b) {
  const std::size_t target = std::min(group_[a], group_[b]), other = std::max(group_[a], group_[b]);
  std::ranges::replace(group_, other, target);
}

std::vector<TensorId> Tensors::members(std::size_t group) const {
  std::vector<TensorId> found;
  for (TensorId tensor = 0; tensor < group_.size(); ++tensor) {
    if (group_[tensor] == group) found.push_back(tensor);
  }
  return found;
}

// Tensors with the same fixed location form one group, and must not overwrite each other.
void Tensors::share_fixed_locations() {
  for (TensorId a = 0; a < tensors_.size(); ++a) {
    for (TensorId b = a + 1; b < tensors_.size(); ++b) {
      if (group_[a] == group_[b] || !tensors_[a].fixed || tensors_[a].fixed != tensors_[b].fixed) continue;
      ensure(can_share(a, b), "two arrays of a program need one location at the same time");
      share(a, b);
    }
  }
}

void Tensors::assign(Program& program) {
  for (const bool copied : {true, false}) {
    for (const Sharing& sharing : sharings_) {
      if (sharing.copied != copied || group_[sharing.from] == group_[sharing.to]) continue;
      if (can_share(sharing.from, sharing.to)) share(sharing.from, sharing.to);
    }
  }
  share_fixed_locations();
  locations_.assign(tensors_.size(), {});
  std::vector<std::size_t> groups;
  for (std::size_t group = 0; group < tensors_.size(); ++group) {
    const std::vector<TensorId> in_group = members(group);
    if (in_group.empty()) continue;
    Buffer buffer{0, tensors_[in_group.front()].bytes, static_cast<std::size_t>(kAfter), 0};
    bool fixed = false;
    for (const TensorId member : in_group) {
      const Tensor& tensor = tensors_[member];
      if (tensor.fixed) locations_[group] = *tensor.fixed;
      fixed = fixed || tensor.fixed;
      buffer.first =
          std::min(buffer.first, static_cast<std::size_t>(std::max<std::ptrdiff_t>(tensor.first, 0)));
      buffer.last = std::max(buffer.last, static_cast<std::size_t>(std::max<std::ptrdiff_t>(tensor.last, 0)));
    }
    if (fixed) continue;
    program.buffers.push_back(buffer);
    groups.push_back(group);
  }
  program.workspace_bytes = place_buffers(program.buffers);
  for (std::size_t i = 0; i < groups.size(); ++i)
    locations_[groups[i]] = {Area::kWorkspace, program.buffers[i].offset};
}

}  // namespace sluice::models
