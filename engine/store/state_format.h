#pragma once
#include <cstddef>
#include <vector>

#include "core/dtype.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// What is kept for the elements of a trainable unit beside its parameters: the master, where the parameters'
// type is narrower and the optimizer keeps one, then the optimizer's arrays as it describes them. The arrays
// of a chunk lie side by side.
class StateFormat {
 public:
  StateFormat(const optim::Optimizer& optimizer, Dtype parameters) {
    if (parameters != Dtype::kF32 && optimizer.keeps_master()) types_.push_back(Dtype::kF32);
    masters_ = types_.size();
    for (const optim::StateArray& array : optimizer.state()) types_.push_back(array.type);
    for (const Dtype type : types_) element_bytes_ += size_of(type);
  }

  bool has_master() const { return masters_ > 0; }  // it is array 0 then
  std::size_t masters() const { return masters_; }  // 0 or 1: the first of the optimizer's arrays
  std::size_t arrays() const { return types_.size(); }
  Dtype type(std::size_t array) const { return types_[array]; }
  std::size_t bytes(std::size_t elements) const { return elements * element_bytes_; }
  // An array's part of a chunk of so many elements.
  Array array(std::byte* chunk, std::size_t elements, std::size_t index) const {
    std::size_t offset = 0;
    for (std::size_t i = 0; i < index; ++i) offset += elements * size_of(types_[i]);
    return {chunk + offset, types_[index]};
  }

 private:
  std::vector<Dtype> types_;
  std::size_t masters_ = 0, element_bytes_ = 0;
};

}  // namespace sluice::engine
