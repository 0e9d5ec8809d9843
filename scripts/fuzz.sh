#!/usr/bin/env bash
# Builds the fuzzers (tests/fuzz has one for each parser) and runs each from its corpus, as many at a time as there are cores. A finding
# ends the run.
#   scripts/fuzz.sh [SECONDS [NAME...]]    runs each for SECONDS, by default 60; NAMEs ("manifest") limit which
# Inputs that reach new code are kept in build/fuzz/found/NAME, and a later run begins with them.
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
run() {
  local name=$1 found=build/fuzz/found/$1
  mkdir -p "$found"
  if ! "build/fuzz/bin/${name}_fuzzer" -max_total_time="$seconds" -artifact_prefix="build/fuzz/$name-" \
      "$found" "tests/fuzz/corpus/$name" > "build/fuzz/$name.log" 2>&1; then
    echo "fuzz: $name failed:"
    tail -n 40 "build/fuzz/$name.log"
    return 255  # makes xargs start no further ones
  fi
  echo "fuzz: $name, $seconds s: $(tail -n 1 "build/fuzz/$name.log")"
}
export -f run
export seconds
printf '%s\n' "${names[@]}" | xargs -P "$(nproc)" -I{} bash -c 'run {}'
