#!/usr/bin/env bash
# Builds everything into build/: build/bin/sluice, build/lib/libsluice.so, the tests and the benches.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
cmake --preset "${1:-release}" > /dev/null
if [[ "${1:-release}" == release ]]; then folder=build; else folder="build/$1"; fi
cmake --build "$folder"
