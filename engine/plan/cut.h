#pragma once
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/layout/layout.h"
#include "engine/plan/pipeline.h"

namespace sluice::engine {

// A cut says which units each chunk of a pipeline's sections has, in the model's order. The first unit of a
// model is its embedding, and the last one its head; between them are blocks, of which each chunk has at
// least one.

// The units that a section has of a cut, by chunk.
std::vector<UnitRange> units_of(std::span<const UnitRange> cut, int sections, int section);

// Cuts so that simulate() finds the shortest step. It begins where the longest chunk is shortest, and moves
// borders by a unit while that helps. seconds: of an item, by unit. fits: whether a section may have these
// units as one of its chunks. Returns nothing where no cut fits. REQUIRES: there are as many blocks as
// chunks.
using Fits = std::function<bool(int section, UnitRange units)>;
std::vector<UnitRange> cut(const Pipeline& pipeline, std::span<const SectionSeconds> seconds,
                           const Fits& fits);

// Reads a cut of so many blocks: "0-7,8-15", or "0,1-3" where a chunk has one block. Throws
// Error(kInvalidArgument) where chunks leave blocks out, overlap, or are not in order.
std::vector<UnitRange> parse_cut(std::string_view text, std::size_t blocks);
// The same in words.
std::string to_text(std::span<const UnitRange> cut);

}  // namespace sluice::engine
