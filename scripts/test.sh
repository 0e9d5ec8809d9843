#!/usr/bin/env bash
# Does all set-up and runs all checks of CI: the format of the sources, clang-tidy, the types of the Python package, the demo, the build,
# the C++ tests (ctest), the Python tests (pytest, with PyTorch as the reference), and each fuzzer for some seconds.
#   scripts/test.sh [--all]    --all: also the tests marked as long, which make many runs where others make a few
set -euo pipefail
cd "$(dirname "$0")/.."
long=()
case "${1:-}" in
  "") ;;
  --all)
    long=(--long)
    export SLUICE_LONG_TESTS=1  # for tests/main.cc
    ;;
  *) echo "test: '$1' is no option; only --all is one" >&2; exit 2 ;;
esac
cores=$(nproc)
jobs=$((cores + (cores + 1) / 2))  # tests also wait: for disks, for each other's ranks, and for time limits
part() { printf '== %s (after %d s)\n' "$*" "$SECONDS"; }

scripts/setup.sh --clang --python --cuda
part "format and types"
(cd bindings/python && ../../.venv/bin/python -m mypy) &
types=$!
git ls-files -z '*.h' '*.cc' '*.c' | xargs -0 -P "$cores" -n 100 clang-format-14 --dry-run -Werror
scripts/tidy.sh allocator comm core kernels offload optim  # which are read in a minute; the others take three
wait "$types"
part "demo"
scripts/demo.sh  # before everything else is built, so that its time is that of a user's first build
part "build"
scripts/build.sh
# Without kernels the GPU tests are skipped, as on a machine without nvcc.
[[ -f build/lib/libsluice_kernels.fatbin ]] || { echo "test: the GPU's kernels were not built; cmake --preset release says why" >&2; exit 1; }
part "C++ tests"
ctest --test-dir build --output-on-failure --timeout 600 -j "$jobs"
part "Python tests"
# The test processes share the cores, so OpenMP threads must wait passively: spinning ones would take the cores from others.
# Files are distributed by name: in the order of their numbers of tests, slow files with few tests would come last, and cores
# would idle.
OMP_WAIT_POLICY=passive .venv/bin/python -m pytest -q -n "$jobs" --dist loadfile --no-loadscope-reorder "${long[@]}" tests/python
part "fuzzers"
scripts/fuzz.sh 5
part "passed"
((${#long[@]})) || echo "(The tests that are marked as long were left out; scripts/test.sh --all runs them, too.)"
