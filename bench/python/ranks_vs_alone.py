#!/usr/bin/env python3
"""Measures the cost of training with several ranks on one machine. It compares the step of N ranks of one thread each, at each stage, with the
step of one rank of N threads (or of as many as there are cores, if these are fewer), which computes as much: seconds, and processor seconds.
Beside it is the peak memory of rank 0.

The processor's seconds, divided by the number of steps, are the user and system time of all processes of a run, from the end of its first step
to the end of its last but one. --bytes gives the model a vocabulary of bytes, so that many ranks fit. Sides take turns, and figures are medians
over the rounds and over a run's steps but its first. --json prints JSON.

    python3 bench/python/ranks_vs_alone.py --model gpt2-124m --batch 2 --seq 256 --accumulate 2
    python3 bench/python/ranks_vs_alone.py --bytes --batch 1 --accumulate 16 --ranks 8 --stages 0 1 3
"""
import os
import pathlib
import statistics
import subprocess
import sys
import time

from side_by_side import CORES, ROOT, make_text, make_tokens, options_of, parser_of, ran_by_turns, rows_of, tell, temporary_folder


def arguments():
    parser = parser_of(__doc__, model="gpt2-124m", batch=2, seq=256, accumulate=CORES, dtype="f32", ranks=CORES, rounds=3, steps=4, memory="6GiB")
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--bytes", action="store_true", help="bytes are the model's vocabulary")
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
        sys.exit(f"ranks_vs_alone: sluice train ended with {process.returncode}")


def side(a, data, folder, more):
    """Returns a step's seconds and the processor's in it, user and system, and the peak memory of rank 0."""
    metrics = folder / "metrics.jsonl"
    for earlier in folder.glob("metrics*.jsonl"):
        earlier.unlink()
    words = [ROOT / "build/bin/sluice", "train", *options_of(a, "model", "memory", "batch", "seq", "accumulate", "dtype"), *data,
             "--steps", a.steps + 2, "--eval-every", 0, "--progress", "none", "--metrics", metrics, *more]
    with subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL) as process:
        wait_for_rows(process, metrics, 1)
        before = processor_seconds(process.pid)
        wait_for_rows(process, metrics, a.steps + 1)
        user, system = ((after - earlier) / a.steps for after, earlier in zip(processor_seconds(process.pid), before, strict=True))
    rows = rows_of(metrics)
    return {"user": user, "system": system, "seconds": statistics.median(row["seconds"] for row in rows[1:]), "peak": rows[-1]["peak_memory"]}


def main():
    a = arguments()
    alone = min(a.ranks, CORES)
    with temporary_folder() as folder:
        count = 64 * a.accumulate * a.batch * a.seq
        data = ["--data", make_text(folder / "text.txt", count) if a.bytes else make_tokens(folder / "tokens.bin", count)]
        data += ["--tokens", "bytes"] if a.bytes else []
        runs = {f"1 rank of {alone} threads": ["--threads", alone]}
        runs |= {f"{a.ranks} ranks, stage {stage}": ["--threads", 1, "--ranks", a.ranks, "--stage", stage] for stage in a.stages}
        found = ran_by_turns({run: lambda more=more: side(a, data, folder, more) for run, more in runs.items()}, a.rounds)
    result = {name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]} for name, rounds in found.items()}
    tell(a, result, show)


def show(result):
    base = next(iter(result.values()))
    for name, row in result.items():
        processor = row["user"] + row["system"]
        print(f"{name}: {row['seconds']:.3f} s a step ({row['seconds'] / base['seconds']:.3f}), {processor:.2f} processor seconds "
              f"({processor / (base['user'] + base['system']):.3f}), {row['user']:.2f} of them the user's, peak of rank 0 {row['peak'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
