#pragma once
#include <string>

namespace sluice {

// Loads a plug-in: a shared object of Sluice's that is loaded on demand, because it links a library that
// other processes must not, or need not, have. It is searched for in SLUICE_LIBRARY_PATH, beside this
// library, and on the loader's path. `how` has dlopen()'s flags. The plug-in is never unloaded. Returns the
// result of its function `symbol`, the address of a table that begins with its interface version. Throws
// Error(kNotFound) where there is no plug-in, or one whose version is not `abi`; its text contains `what` and
// `remedy`, as in "the matrix library" and "install oneDNN". Thread rule: any thread.
const void* open_plugin(const std::string& file, const char* symbol, unsigned abi, int how,
                        const std::string& what, const std::string& remedy);

}  // namespace sluice
