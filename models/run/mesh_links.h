#pragma once
#include <optional>
#include <vector>

#include "engine/plan/rates.h"
#include "models/run/trainer.h"

// What joins the ranks of a run along the axes of its mesh: a host's wire to other hosts, which its ranks
// share, or what is within a host.
namespace sluice::models {

// How many sections the model is cut into: the stages of a pipeline. 1: it is not.
int sections_of(const TrainSettings& settings);
// The ranks that have a section, by their coordinates along "data".
std::vector<int> ranks_of_section(const TrainSettings& settings, int section);
// The ranks that have the same part of the model as that one of settings.ranks, or as this one.
engine::RankOf data_ranks(const TrainSettings& settings, int rank);
engine::RankOf data_ranks(const TrainSettings& settings);

// Sets what joins these ranks, for a plan. Where they are on several hosts, all ranks of a host send at the
// same time, and each has the same share of the wire.
void set_links(const TrainSettings& settings, int rank, engine::MachineRates& rates);
// What joins two sections: where they are on different hosts, as many ranks of a host send at the same time
// as have a neighbour on another one. Nothing: not known.
std::optional<engine::Link> link_between(const TrainSettings& settings, int section, int other);

}  // namespace sluice::models
