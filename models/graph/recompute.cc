#include "models/graph/recompute.h"

#include <algorithm>
#include <optional>

namespace sluice::models {
namespace {

std::vector<bool> read_by_backward(const Graph& graph) {
  std::vector<bool> read(graph.values().size());
  for (const auto& op : graph.ops()) {
    for (const ValueId value : op->spec().saved) read[value] = true;
  }
  return read;
}

// Marks the ops that must run again to provide `value`.
void demand(const Graph& graph, const std::vector<bool>& kept, ValueId value, std::vector<bool>& again) {
  const auto producer = graph.producer(value);
  if (kept[value] || !producer || again[*producer]) return;
  again[*producer] = true;
  for (const ValueId input : graph.ops()[*producer]->spec().inputs) demand(graph, kept, input, again);
}

std::string joined_names(const Graph& graph, const std::vector<bool>& dropped) {
  std::string names;
  for (std::size_t op = 0; op < dropped.size(); ++op) {
    if (dropped[op]) names += (names.empty() ? "" : "+") + graph.ops()[op]->spec().name;
  }
  return names;
}

// Returns the ladder's next choice, or nothing where no further op saves a byte.
std::optional<Choice> cheapest_drop(const Graph& graph, const Choice& current) {
  const double work = recompute_work(graph, current);
  const std::size_t bytes = kept_bytes(graph, current);
  std::optional<Choice> best;
  double best_price = 0;
  for (std::size_t op = 0; op < graph.ops().size(); ++op) {
    if (current.dropped[op]) continue;
    Choice next = current;
    next.dropped[op] = true;
    const std::size_t saved = bytes - kept_bytes(graph, next);
    if (saved == 0) continue;
    const double price = (recompute_work(graph, next) - work) / static_cast<double>(saved);
    if (best && price >= best_price) continue;
    best = std::move(next);
    best_price = price;
  }
  return best;
}

}  // namespace

std::vector<ValueId> kept_values(const Graph& graph, const Choice& choice) {
  std::vector<ValueId> kept;
  const std::vector<bool> read = read_by_backward(graph);
  for (ValueId value = 0; value < read.size(); ++value) {
    const auto producer = graph.producer(value);
    if (read[value] && producer && !choice.dropped[*producer]) kept.push_back(value);
  }
  return kept;
}

std::size_t kept_bytes(const Graph& graph, const Choice& choice) {
  std::size_t bytes = 0;
  for (const ValueId value : kept_values(graph, choice)) bytes += graph.values()[value].bytes();
  return bytes;
}

std::vector<std::size_t> recomputed_ops(const Graph& graph, const Choice& choice) {
  std::vector<bool> kept(graph.values().size());
  for (const ValueId value : kept_values(graph, choice)) kept[value] = true;
  std::vector<bool> again(graph.ops().size());
  const std::vector<bool> read = read_by_backward(graph);
  for (ValueId value = 0; value < read.size(); ++value) {
    if (read[value]) demand(graph, kept, value, again);
  }
  std::vector<std::size_t> ops;
  for (std::size_t op = 0; op < again.size(); ++op) {
    if (again[op]) ops.push_back(op);
  }
  return ops;
}

double recompute_work(const Graph& graph, const Choice& choice) {
  double work = 0;
  for (const std::size_t op : recomputed_ops(graph, choice)) {
    const OpSpec& spec = graph.ops()[op]->spec();
    work += spec.forward_flops + kFlopsPerByte * spec.forward_bytes;
  }
  return work;
}

std::vector<Choice> choice_ladder(const Graph& graph) {
  const std::size_t ops = graph.ops().size();
  Choice current{"none", std::vector<bool>(ops, false)};
  // Without an output there is no forward pass that could keep anything.
  if (!graph.output()) current.dropped.assign(ops, true);
  std::vector<Choice> ladder{current};
  while (auto next = cheapest_drop(graph, ladder.back())) {
    next->name = joined_names(graph, next->dropped);
    ladder.push_back(std::move(*next));
  }
  if (ladder.size() > 1) ladder.back().name = "full";
  return ladder;
}

std::vector<std::string> split_names(const std::string& names) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= names.size();) {
    const std::size_t end = std::min(names.find('+', begin), names.size());
    parts.push_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Choice named_choice(const Graph& graph, const std::string& names) {
  const std::vector<std::string> parts = split_names(names);
  Choice choice{names, std::vector<bool>(graph.ops().size(), !graph.output())};
  for (std::size_t op = 0; op < graph.ops().size(); ++op) {
    if (std::ranges::count(parts, graph.ops()[op]->spec().name) > 0) choice.dropped[op] = true;
  }
  return choice;
}

}  // namespace sluice::models
