#pragma once
#include <string>
#include <vector>

#include "models/graph/graph.h"

// The trade-off between keeping values from forward to backward and recomputing them, by the ops'
// declarations.
namespace sluice::models {

// A set of ops whose outputs are not kept.
struct Choice {
  std::string name;           // "none", "full", or the ops joined by +
  std::vector<bool> dropped;  // by op: its outputs are not kept
};

// Returns the values that backward reads and the choice keeps, in order, without the unit's input.
std::vector<ValueId> kept_values(const Graph& graph, const Choice& choice);
std::size_t kept_bytes(const Graph& graph, const Choice& choice);

// Returns the ops that run again in backward, in order: those that produce values that are needed and not
// kept.
std::vector<std::size_t> recomputed_ops(const Graph& graph, const Choice& choice);

// Returns the work of running them again, in flops; a byte of memory traffic counts as kFlopsPerByte.
inline constexpr double kFlopsPerByte = 5;
double recompute_work(const Graph& graph, const Choice& choice);

// Returns the choices from "none" (all values that backward needs are kept) to "full" (only the input is).
// Each drops one op more, the one with the least work for each byte saved. Where no op saves any, there is
// only "none".
std::vector<Choice> choice_ladder(const Graph& graph);

// Returns the choice that drops the ops of a text such as "ln1+ln2+gelu"; names that the graph lacks are
// ignored.
Choice named_choice(const Graph& graph, const std::string& names);
std::vector<std::string> split_names(const std::string& names);

}  // namespace sluice::models
