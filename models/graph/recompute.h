#pragma once
#include <string>
#include <vector>

#include "models/graph/graph.h"

// Which values are kept from forward to backward, and what is made again: derived from the ops' declarations.
namespace sluice::models {

// A set of ops whose outputs are not kept.
struct Choice {
  std::string name;           // "none", "full", or the ops joined by +
  std::vector<bool> dropped;  // by op
};

// What backward reads and the choice keeps, in order; without the unit's input, which is always there.
std::vector<ValueId> kept_values(const Graph& graph, const Choice& choice);
std::size_t kept_bytes(const Graph& graph, const Choice& choice);

// The ops that run again in backward: those of which something is needed that is not kept, and what they need
// in turn.
std::vector<std::size_t> recomputed_ops(const Graph& graph, const Choice& choice);

// The work of running them again, in flops; a byte of memory traffic counts as kFlopsPerByte.
inline constexpr double kFlopsPerByte = 5;
double recompute_work(const Graph& graph, const Choice& choice);

// From "none" (all that backward needs is kept) to "full" (only the input is): each step drops the op that
// costs the least work for a byte saved, given what is dropped already. Where nothing can be saved, "none" is
// all there is.
std::vector<Choice> choice_ladder(const Graph& graph);

// The ops of a text such as "ln1+ln2+gelu"; names that this graph lacks are passed over.
Choice named_choice(const Graph& graph, const std::string& names);
std::vector<std::string> split_names(const std::string& names);

}  // namespace sluice::models
