#pragma once
#include <map>
#include <string>
#include <string_view>

// Files that each rank of a run writes separately.
namespace sluice::models {

// Returns a rank's file name beside that of rank 0: "run.rank2.jsonl" beside "run.jsonl"; empty beside a pipe
// or a device.
std::string path_of_rank(const std::string& first, int rank);
// The same. Also tries to create the folder, which another host than rank 0's may lack.
std::string place_of_rank(const std::string& first, int rank);

// Whether the file is absent, empty, or one of its kind from an earlier run, which has this beginning.
bool may_be_replaced(const std::string& path, std::string_view beginning);

// Returns the files beside rank 0's of ranks that do not take part now (numbers `ranks` and higher), by rank.
std::map<int, std::string> files_of_absent_ranks(const std::string& first, int ranks);
// Removes those that may be replaced: an earlier run with more ranks left them, and they would be mistaken
// for a part of this one.
void remove_files_of_absent_ranks(const std::string& first, int ranks, std::string_view beginning);

}  // namespace sluice::models
