#!/usr/bin/env bash
# Builds the fuzzers (tests/fuzz, one a parser) and runs each from its corpus; one that finds something ends the run.
#   scripts/fuzz.sh [SECONDS [NAME...]]    SECONDS: of each, 60 if not given; NAME: "manifest", all if none
# What they reach is kept in build/fuzz/found/NAME, and a later run goes on from there.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
names=("$@")
if ((${#names[@]} == 0)); then
  for file in tests/fuzz/*_fuzzer.cc; do names+=("$(basename "$file" _fuzzer.cc)"); done
fi

scripts/setup.sh --clang
cmake --preset fuzz > /dev/null
cmake --build build/fuzz --target "${names[@]/%/_fuzzer}"
for name in "${names[@]}"; do
  echo "fuzz: $name, $seconds s"
  found=build/fuzz/found/$name
  mkdir -p "$found"
  if ! "build/fuzz/bin/${name}_fuzzer" -max_total_time="$seconds" -artifact_prefix="build/fuzz/$name-" \
      "$found" "tests/fuzz/corpus/$name" > "build/fuzz/$name.log" 2>&1; then
    tail -n 40 "build/fuzz/$name.log"
    exit 1
  fi
  tail -n 1 "build/fuzz/$name.log"
done
