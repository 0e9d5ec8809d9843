#pragma once
#include <optional>
#include <string>

#include "offload/measure.h"

namespace sluice::cli {

// What fio reaches on a file of `bytes` that is there already, by io_uring past the page cache, from buffers
// in huge pages where the machine gives them: writes it, then reads it. Nothing where fio is not installed or
// fails; `why` then says which. It ends with this process.
std::optional<offload::DiskRates> fio_rates(const std::string& path, std::uint64_t bytes,
                                            const offload::StreamShape& shape, std::string* why);

}  // namespace sluice::cli
