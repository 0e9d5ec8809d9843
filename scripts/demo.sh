#!/usr/bin/env bash
# Sets everything up and runs the main job in a few minutes: a transformer whose training state does not fit in the
# stated memory learns from real text; the run is killed, resumes, and writes a sample.
#   scripts/demo.sh [TEXT]    TEXT is a file or folder of text, by default sources of Python's standard library
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh release sluice_main
built=$SECONDS

text=${1:-$(python3 -c 'import os; print(os.path.dirname(os.__file__) + "/asyncio")')}
work=$(mktemp -d "${TMPDIR:-$PWD/build}/demo.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/swap"
sluice=build/bin/sluice
# The model is a Llama of 5 million parameters, made from its config.json alone. Its weights, gradients and optimizer state
# are 78 MiB and the process itself takes 64 MiB; the budget for all is 150 MiB.
run=(--config scripts/demo/settings.json --data "$text" --disk "$work/swap:2GiB" --metrics "$work/metrics.jsonl")
step() { printf '\n== %s\n' "$*"; }

step "the plan"
$sluice plan "${run[@]}" --out "$work/run"

step "training, killed with SIGKILL after its first checkpoint"
$sluice train "${run[@]}" --out "$work/run" &
pid=$!
until compgen -G "$work/run/step-*" > /dev/null; do
  kill -0 $pid 2> /dev/null || { wait $pid; exit 1; }
  sleep 0.2
done
sleep 2
kill -KILL $pid
wait $pid 2> /dev/null || true

step "the same command with --resume goes on from the checkpoint, with the same bits"
$sluice train "${run[@]}" --out "$work/run" --resume

step "what it learned: the loss in nats a byte (a model that has learned nothing has ln 256 = 5.55)"
python3 - "$work/metrics.jsonl" << 'END'
import json
import sys

lines = [json.loads(line) for line in open(sys.argv[1])]
measured = [line for line in lines if "validation_loss" in line]
print(f"first step         {lines[0]['loss']:.2f}")
for line in (measured[0], measured[-1]):
    print(f"after step {line['step']:<7} {line['loss']:.2f}; {line['validation_loss']:.2f} on text that it was not shown")
END

step "samples"
for seed in 1 2; do
  $sluice generate --checkpoint "$work/run" --prompt "    def " --tokens 240 --temperature 0.7 --seed "$seed"
  echo
done
step "built in $built s, trained and sampled in $((SECONDS - built)) s"
