#pragma once
#include <string>

namespace sluice {

// Opens a plug-in, a shared object of Sluice's that is loaded when it is needed, because it brings a library
// that other processes must not have, or need not have. It is looked for in SLUICE_LIBRARY_PATH, beside this
// library, and where the system's loader looks. `how` is dlopen's. It is never closed. Returns what the
// function `symbol` returns, the address of a table that begins with the version of its interface. Throws
// Error(kNotFound) where there is none, or of another version than `abi`; `what` and `remedy` stand in it, as
// in "the matrix library" and "install oneDNN". Thread rule: any thread.
const void* open_plugin(const std::string& file, const char* symbol, unsigned abi, int how,
                        const std::string& what, const std::string& remedy);

}  // namespace sluice
