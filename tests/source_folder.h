#pragma once

namespace sluice::test {

// The folder of the project's sources, of which some tests read files.
extern const char* const kSourceFolder;

}  // namespace sluice::test
