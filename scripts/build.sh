#!/usr/bin/env bash
# Builds everything into build/: build/bin/sluice, the libraries in build/lib, the tests and the benches.
#   scripts/build.sh [PRESET [TARGET...]]    PRESET is one of CMakePresets.json, by default release; TARGETs limit the build
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
shift || true
scripts/setup.sh
cmake --preset "$preset" > /dev/null
folder=build
if [[ $preset != release ]]; then folder=build/$preset; fi
cmake --build "$folder" --target "${@:-all}"
