#!/usr/bin/env python3
"""Measures how much processor time a step takes with several ranks of one thread on this machine, at each stage, beside one rank with as
many threads as there are cores, which computes the same micro-batches.

The processor's seconds, divided by the number of steps, are the user and system time of all processes of a run, from the end of its first
step to the end of its last but one. The model has a vocabulary of bytes, so that all ranks fit. Sides take turns, and figures are medians
over the rounds. Peak memory is rank 0's. --json prints JSON.

    python3 bench/python/processor_of_ranks.py --model gpt2-124m --batch 1 --seq 256 --accumulate 16 --ranks 8
"""
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from side_by_side import CORES, ROOT, parser_of, temporary_folder


def arguments():
    parser = parser_of(__doc__, model="gpt2-124m", batch=1, seq=256, accumulate=16, dtype="f32", ranks=8, rounds=3, steps=4)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 3])
    parser.add_argument("--build", type=pathlib.Path, nargs="*", default=[ROOT / "build"], help="builds to set beside each other")
    return parser.parse_args()


def processor_seconds(process):
    """Returns the user and system seconds of the process and its children so far."""
    tick = os.sysconf("SC_CLK_TCK")
    children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    stats = [pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in (process, *children)]
    return [sum(int(stat[field]) for stat in stats) / tick for field in (11, 12)]


def wait_for_rows(process, metrics, count):
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < count):
        time.sleep(0.002)
    if process.poll() is not None:
        sys.exit(f"processor_of_ranks: sluice train ended with {process.returncode}")


def side(a, build, text, folder, more):
    """Returns the user and system seconds of a step."""
    metrics = folder / "metrics.jsonl"
    for earlier in folder.glob("metrics*.jsonl"):
        earlier.unlink()
    words = [build / "bin/sluice", "train", "--model", a.model, "--data", text, "--tokens", "bytes", "--batch", a.batch, "--seq", a.seq,
             "--accumulate", a.accumulate, "--dtype", a.dtype, "--steps", a.steps + 2, "--eval-every", 0, "--progress", "none",
             "--metrics", metrics, *more]
    with subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL) as process:
        wait_for_rows(process, metrics, 1)
        before = processor_seconds(process.pid)
        wait_for_rows(process, metrics, a.steps + 1)
        each = [(after - earlier) / a.steps for after, earlier in zip(processor_seconds(process.pid), before, strict=True)]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {"user": each[0], "system": each[1], "seconds": statistics.median(row["seconds"] for row in rows[1:]),
            "peak": rows[-1]["peak_memory"]}


def main():
    a = arguments()
    sides = {}
    for build in a.build:
        name = "" if len(a.build) == 1 else f"{build}: "
        sides[f"{name}1 rank of {CORES} threads"] = build, ["--threads", CORES]
        sides |= {f"{name}{a.ranks} ranks, stage {stage}": (build, ["--threads", 1, "--ranks", a.ranks, "--stage", stage])
                  for stage in a.stages}
    found = {name: [] for name in sides}
    with temporary_folder(tempfile.gettempdir()) as folder:
        text = folder / "text.txt"
        text.write_bytes(bytes(32 + byte % 95 for byte in random.Random(1).randbytes(64 * a.accumulate * a.batch * a.seq)))
        for number in range(a.rounds):
            for name, (build, more) in sides.items():
                found[name].append(side(a, build, text, folder, more))
            print(f"round {number + 1}/{a.rounds}", file=sys.stderr)
    result = {name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]} for name, rounds in found.items()}
    if a.json:
        print(json.dumps(result))
        return
    base = next(iter(result.values()))
    for name, row in result.items():
        processor = row["user"] + row["system"]
        print(f"{name}: {processor:.2f} processor seconds a step ({processor / (base['user'] + base['system']):.3f}), {row['user']:.2f} "
              f"of them the user's, in {row['seconds']:.2f} s, at most {row['peak'] / 2**20:.0f} MiB a rank")


if __name__ == "__main__":
    main()
