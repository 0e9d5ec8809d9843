#!/usr/bin/env bash
# Checks sources with clang-tidy and the settings in .clang-tidy. A finding ends the run.
#   scripts/tidy.sh [ROOM...]    of these rooms ("engine", "c", "cli"); by default of all, which takes three minutes on two cores
set -euo pipefail
cd "$(dirname "$0")/.."
rooms=$(IFS='|'; echo "${*:-[a-z]+}")

scripts/setup.sh --clang --tidy
cmake --preset fuzz > /dev/null  # for clang's flags
scripts/kernels.sh --id build/fuzz/generated/kernels_id.h
# Files of a room are checked in one unit, as they are compiled, so that headers are parsed once. The plug-in of oneDNN needs
# GCC's omp.h.
files=$(grep -oE '"file": "[^"]+"' build/fuzz/compile_commands.json | cut -d'"' -f4 |
  grep -E "/sluice_[a-z]+\.dir/Unity/" | grep -v /sluice_dnnl.dir/)
for room; do
  grep -q "/sluice_$room\.dir/" <<< "$files" || { echo "tidy: no room is named so: $room" >&2; exit 2; }
done
grep -E "/sluice_($rooms)\.dir/" <<< "$files" | xargs -P "$(nproc)" -n 1 clang-tidy-16 -p build/fuzz --quiet --config-file=.clang-tidy 2> \
  >(grep -v 'warnings generated\|^$' >&2)
