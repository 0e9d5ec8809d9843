#include "models/ops/rotary.h"

#include "kernels/rope.h"

namespace sluice::models {
void turn(Threads& threads, const Rotary& rotary, std::size_t rows, std::size_t first_position, bool inverse,
          Array packed) {
  kernels::rope(threads, rows, rotary.length, first_position, rotary.heads, rotary.head_width, rotary.stride,
                rotary.frequencies, inverse, packed);
}

}  // namespace sluice::models
