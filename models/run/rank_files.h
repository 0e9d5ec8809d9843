#pragma once
#include <map>
#include <string>
#include <string_view>

// Files that each rank of a run writes for itself.
namespace sluice::models {

// The file of a rank beside that of rank 0: "run.rank2.jsonl" beside "run.jsonl"; none beside a pipe or a
// device.
std::string path_of_rank(const std::string& first, int rank);
// The same. Makes the folder, which another host than rank 0's need not have, as far as it can.
std::string place_of_rank(const std::string& first, int rank);

// Whether there is no such file, an empty one, or an earlier run's of its kind, which has this beginning.
bool may_be_replaced(const std::string& path, std::string_view beginning);

// The files beside rank 0's of ranks that take no part now (`ranks` and higher), by rank.
std::map<int, std::string> files_of_absent_ranks(const std::string& first, int ranks);
// Removes those that may be replaced: an earlier run of more ranks left them, and they would be taken for a
// part of this one.
void remove_files_of_absent_ranks(const std::string& first, int ranks, std::string_view beginning);

}  // namespace sluice::models
