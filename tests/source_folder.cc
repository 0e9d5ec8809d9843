#include "tests/source_folder.h"

namespace sluice::test {

const char* const kSourceFolder = SLUICE_SOURCE_DIR;

}  // namespace sluice::test
