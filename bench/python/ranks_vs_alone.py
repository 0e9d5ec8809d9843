#!/usr/bin/env python3
"""Measures the cost of training with several ranks on one machine. It compares the step of N ranks of one thread each, at each stage,
with the step of one rank of N threads, which computes as much with as many threads. Beside it is the peak memory of rank 0.

Rounds alternate, and figures are medians. --json prints JSON.

    python3 bench/python/ranks_vs_alone.py --model gpt2-124m --batch 2 --seq 256 --accumulate 2
"""
import json
import statistics
import sys
import tempfile

from side_by_side import CORES, make_tokens, parser_of, sluice_steps, temporary_folder

STAGES = (0, 1, 2, 3)


def arguments():
    return parser_of(__doc__, model="gpt2-124m", batch=2, seq=256, accumulate=CORES, dtype="f32", ranks=CORES, rounds=3, steps=4,
                     memory="6GiB").parse_args()


def steps(a, tokens, folder, *more):
    return sluice_steps(folder, "--model", a.model, "--data", tokens, "--memory", a.memory, "--batch", a.batch, "--seq", a.seq,
                        "--accumulate", a.accumulate, "--dtype", a.dtype, "--steps", a.steps, *more)


def main():
    a = arguments()
    with temporary_folder(tempfile.gettempdir()) as folder:
        tokens = folder / "tokens.bin"
        make_tokens(tokens, 64 * a.accumulate * a.batch * a.seq)
        alone, ranks = [], {stage: [] for stage in STAGES}
        for number in range(a.rounds):
            alone += steps(a, tokens, folder, "--threads", a.ranks)
            for stage in STAGES:
                ranks[stage] += steps(a, tokens, folder, "--threads", 1, "--ranks", a.ranks, "--stage", stage)
            print(f"round {number + 1}/{a.rounds}", file=sys.stderr)
    base = statistics.median(row["seconds"] for row in alone)
    result = {"model": a.model, "ranks": a.ranks, "alone_seconds": base, "alone_peak": alone[-1]["peak_memory"], "stages": []}
    for stage in STAGES:
        seconds = statistics.median(row["seconds"] for row in ranks[stage])
        result["stages"].append({"stage": stage, "seconds": seconds, "ratio": seconds / base, "peak": ranks[stage][-1]["peak_memory"]})
    if a.json:
        print(json.dumps(result))
        return
    print(f"{a.model}, one rank of {a.ranks} threads: {base:.3f} s a step, peak {result['alone_peak'] / 2**20:.0f} MiB")
    for row in result["stages"]:
        print(f"{a.ranks} ranks of one thread, stage {row['stage']}: {row['seconds']:.3f} s ({row['ratio']:.3f}), "
              f"peak of rank 0 {row['peak'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
