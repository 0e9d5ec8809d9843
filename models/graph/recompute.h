#pragma once
#include <string>
#include <vector>

#include "models/graph/graph.h"

// Which values are kept from forward to backward, and which are recomputed, by the ops' declarations.
namespace sluice::models {

// A set of ops whose outputs are not kept.
struct Choice {
  std::string name;           // "none", "full", or the ops joined by +
  std::vector<bool> dropped;  // by op
};

// The values that backward reads and the choice keeps, in order. The unit's input is not counted among them.
std::vector<ValueId> kept_values(const Graph& graph, const Choice& choice);
std::size_t kept_bytes(const Graph& graph, const Choice& choice);

// The ops that run again in backward: those that make what is needed and not kept, in turn.
std::vector<std::size_t> recomputed_ops(const Graph& graph, const Choice& choice);

// The work of running them again, in flops; a byte of memory traffic counts as kFlopsPerByte.
inline constexpr double kFlopsPerByte = 5;
double recompute_work(const Graph& graph, const Choice& choice);

// The choices from "none" (all that backward needs is kept) to "full" (only the input is). Each drops one op
// more, the one that costs the least work for a byte saved. Where no op saves any, there is "none" alone.
std::vector<Choice> choice_ladder(const Graph& graph);

// The choice that drops the ops of a text such as "ln1+ln2+gelu"; names that the graph lacks are ignored.
Choice named_choice(const Graph& graph, const std::string& names);
std::vector<std::string> split_names(const std::string& names);

}  // namespace sluice::models
