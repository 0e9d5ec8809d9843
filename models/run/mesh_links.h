#pragma once
#include <optional>
#include <vector>

#include "engine/plan/rates.h"
#include "models/graph/cut.h"
#include "models/run/trainer.h"

// What joins the ranks of a run along the axes of its mesh: a host's wire to other hosts, which its ranks
// share, or what is within a host.
namespace sluice::models {

// How many sections the model is cut into: the stages of a pipeline. 1: it is not.
int sections_of(const TrainSettings& settings);
// How many parts a step's micro-batches are shared out into, along "data", and which one a rank has.
int data_size(const TrainSettings& settings);
int data_rank(const TrainSettings& settings, int rank);
int tensor_size(const TrainSettings& settings);           // how many ranks there are along "tensor"
SequenceCut sequence_cut(const TrainSettings& settings);  // and how sequences are cut along "sequence"
// How this rank's layers are cut along "tensor". REQUIRES: a reproducible run has its grain.
TensorCut tensor_cut(const TrainSettings& settings);
// The ranks that have a section, along all axes but "pipeline", in the order in which they share its state.
std::vector<int> ranks_of_section(const TrainSettings& settings, int section);
// The ranks that have the same section as that one of settings.ranks, or as this one.
engine::RankOf section_ranks(const TrainSettings& settings, int rank);
engine::RankOf section_ranks(const TrainSettings& settings);

// Sets what joins these ranks, for a plan. Where they are on several hosts, all ranks of a host send at the
// same time, and each has the same share of the wire.
void set_links(const TrainSettings& settings, int rank, engine::MachineRates& rates);
// What joins two sections: where they are on different hosts, as many ranks of a host send at the same time
// as have a neighbour on another one. Nothing: not known.
std::optional<engine::Link> link_between(const TrainSettings& settings, int section, int other);

}  // namespace sluice::models
