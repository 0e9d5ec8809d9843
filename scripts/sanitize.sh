#!/usr/bin/env bash
# Builds a sanitizer preset and runs the tests of the rooms (top-level folders) that it can instrument. Rooms with code
# shared by threads come first.
#   scripts/sanitize.sh        both presets, one after the other, and says how long each took
#   scripts/sanitize.sh asan   AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer
#   scripts/sanitize.sh tsan   ThreadSanitizer
# Further arguments are names of rooms, and limit the run to them. SLUICE_JOBS is the number of concurrent compilers (by default
# one a core).
set -euo pipefail
cd "$(dirname "$0")/.."
if (($# == 0)); then
  found=0
  for preset in asan tsan; do
    begun=$SECONDS
    scripts/sanitize.sh "$preset" || found=1
    echo "sanitize: $preset took $((SECONDS - begun)) s"
  done
  exit "$found"
fi
preset="$1"
shift

case "$preset" in
  asan) rooms=(engine comm cuda offload core allocator optim kernels models) ;;
  tsan) rooms=(engine comm cuda offload core allocator) ;;
  *)
    echo "sanitize: '$preset' is not a preset; use asan or tsan" >&2
    exit 2
    ;;
esac
all="${rooms[*]}"
if (($#)); then rooms=("$@"); fi
for room in "${rooms[@]}"; do
  [[ " $all " == *" $room "* ]] || { echo "sanitize: $preset does not run the tests of '$room'; it runs those of: $all" >&2; exit 2; }
done

export ASAN_OPTIONS="halt_on_error=1:detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1"
export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1"
# A room fails after all its races are reported. die_after_fork=0 is for tests that fork while threads run, to kill the child.
export TSAN_OPTIONS="halt_on_error=0:die_after_fork=0:second_deadlock_stack=1:suppressions=$PWD/scripts/tsan.supp"

if [[ "$preset" == tsan ]]; then
  echo "sanitize: skipped: kernels, optim, models, bindings: their loops run on oneTBB and OpenMP, which Debian builds"
  echo "          without ThreadSanitizer; where the rooms below use such loops, plain threads run them"
  echo "sanitize: skipped: comm's tests of ranks that are processes: ThreadSanitizer follows no threads of forked processes"
else
  echo "sanitize: skipped: bindings: its tests start the command line, which the tests of its rooms cover here"
  echo "sanitize: skipped: UndefinedBehaviorSanitizer's checks of pointers and bounds, and use after scope, in loops over vectors:"
  echo "          they take ten minutes a file to build; addresses, overflows and shifts are checked there, too"
fi

echo "sanitize: skipped: the fake GPU: its threads change stacks, and its memory stands at several addresses"
echo "sanitize: skipped: comm's tests under mpirun: Debian builds Open MPI without the sanitizers"

scripts/setup.sh
cmake --preset "$preset" > /dev/null
cmake --build "build/$preset" --target "${rooms[@]/%/_test}" -j "${SLUICE_JOBS:-$(nproc)}"
failed=()
for room in "${rooms[@]}"; do
  echo "sanitize: $preset: the tests of $room"
  if [[ "$preset" == asan && "$room" =~ ^(cuda|engine|kernels|models|optim)$ ]]; then
    # LeakSanitizer's tracer crashes in the thread-local memory of the OpenMP library, which is loaded with dlopen.
    echo "sanitize: skipped: leaks of $room: LeakSanitizer crashes at exit where the matrix library is loaded"
    export ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0"
  else
    export ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=1"
  fi
  "build/$preset/bin/${room}_test" --gtest_brief=1 || failed+=("$room")
done
if ((${#failed[@]})); then
  echo "sanitize: $preset: findings in: ${failed[*]}" >&2
  exit 1
fi
echo "sanitize: $preset: clean: ${rooms[*]}"
