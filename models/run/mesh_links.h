#pragma once
#include <optional>
#include <vector>

#include "engine/plan/rates.h"
#include "models/graph/cut.h"
#include "models/run/trainer.h"

// The connections among a run's ranks along the axes of its mesh: the network between hosts, which the ranks
// of a host share, or memory within a host.
namespace sluice::models {

// Returns the number of pipeline sections of the model; 1: it is not cut.
int sections_of(const TrainSettings& settings);
// Return the number of data-parallel parts of a step's micro-batches, along "data", and the part of a rank.
int data_size(const TrainSettings& settings);
int data_rank(const TrainSettings& settings, int rank);
int tensor_size(const TrainSettings& settings);  // the number of ranks along "tensor"
// Return how this rank's sequences are cut along "sequence", and its layers along "tensor". REQUIRES: the
// grains of a reproducible run are settled.
SequenceCut sequence_cut(const TrainSettings& settings);
TensorCut tensor_cut(const TrainSettings& settings);
// Returns the ranks of a section, along all axes but "pipeline", in the order in which they share its state.
std::vector<int> ranks_of_section(const TrainSettings& settings, int section);
// Return the ranks with the same section as the given one of settings.ranks, or as this one.
engine::RankOf section_ranks(const TrainSettings& settings, int rank);
engine::RankOf section_ranks(const TrainSettings& settings);

// Sets in `rates` the links that this rank's collectives use. Where its group is on several hosts, all ranks
// of a host send at the same time, each with an equal share of the network.
void set_links(const TrainSettings& settings, int rank, engine::MachineRates& rates);
// Returns the connection of two sections. Between hosts, all ranks of a host with a neighbour on another host
// send at the same time. Nothing: it is unknown.
std::optional<engine::Link> link_between(const TrainSettings& settings, int section, int other);

}  // namespace sluice::models
