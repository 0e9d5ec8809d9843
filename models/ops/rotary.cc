#include "models/ops/rotary.h"

#include "kernels/rope.h"

namespace sluice::models {

void turn(Threads& threads, const Rotary& rotary, std::span<const RowPart> rows, std::size_t first_position,
          bool inverse, Array packed) {
  for (const RowPart& part : rows)
    kernels::rope(threads, part.rows, part.period, first_position + part.position, rotary.heads,
                  rotary.head_width, rotary.stride, rotary.frequencies, inverse,
                  packed.at(part.row * rotary.stride));
}

}  // namespace sluice::models
