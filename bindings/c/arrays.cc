#include <algorithm>

#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "kernels/elementwise.h"

// Functions that copy from and to whole arrays of the caller. They run inside calls of the engine, and take
// no lock.
namespace sluice::c {
namespace {

// Returns a parameter's array from an element on; data is null where there is none.
sluice::Array find(const void* context, uint32_t parameter, uint32_t array, uint64_t first) {
  const sluice_arrays all = known_part(static_cast<const sluice_arrays*>(context), "the arrays");
  const uint32_t row = parameter - all.first_parameter;
  if (parameter < all.first_parameter || row >= all.parameters || array >= all.arrays) return {};
  const sluice_array& found = all.data[row * all.arrays + array];
  if (found.data == nullptr) return {};
  return sluice::Array{found.data, dtype_of(found.dtype)}.at(first);
}

Threads& one_thread() {
  static Threads one(1);
  return one;
}

int write(const void* context, uint32_t parameter, uint32_t array, uint64_t first, const float* values,
          uint64_t elements) {
  const sluice::Array to = find(context, parameter, array, first);
  if (to.data != nullptr) kernels::convert(one_thread(), elements, {values, Dtype::kF32}, to);
  return 0;
}

int read(const void* context, uint32_t parameter, uint32_t array, uint64_t first, float* values,
         uint64_t elements) {
  const sluice::Array from = find(context, parameter, array, first);
  if (from.data == nullptr)
    std::fill_n(values, elements, 0.0f);
  else
    kernels::convert(one_thread(), elements, {from.data, from.type}, {values, Dtype::kF32});
  return 0;
}

}  // namespace
}  // namespace sluice::c

int sluice_write_values_to_arrays(void* context, uint32_t parameter, uint64_t first_element,
                                  const float* values, uint64_t elements) {
  return sluice::c::write(context, parameter, 0, first_element, values, elements);
}

int sluice_read_values_from_arrays(void* context, uint32_t parameter, uint64_t first_element, float* values,
                                   uint64_t elements) {
  return sluice::c::read(context, parameter, 0, first_element, values, elements);
}

int sluice_write_state_to_arrays(void* context, uint32_t parameter, uint32_t array, uint64_t first_element,
                                 const float* values, uint64_t elements) {
  return sluice::c::write(context, parameter, array, first_element, values, elements);
}

int sluice_read_state_from_arrays(void* context, uint32_t parameter, uint32_t array, uint64_t first_element,
                                  float* values, uint64_t elements) {
  return sluice::c::read(context, parameter, array, first_element, values, elements);
}
