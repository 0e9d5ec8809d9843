#!/usr/bin/env python3
"""Compares a sequential stream through Sluice's File interface, with checksums, with fio (io_uring) and DeepSpeed's aio handle,
each with its best settings, on one disk in one run.

Each round runs `sluice bench disk` (in turn records, files without checksums, a bare io_uring, and fio at the best of 12 shapes,
plain and with registered buffers), and then DeepSpeed. Before the rounds DeepSpeed's block size, queue depth, threads, events,
submission and bytes a call are tuned one after another, for each direction. Figures are medians. --json prints JSON.

    python3 bench/python/disk_vs_peers.py --disk FOLDER --deepspeed-python VENV/bin/python

wrap_vs_deepspeed.py says how DeepSpeed is installed.
"""
import argparse
import contextlib
import json
import os
import statistics
import sys
import time

from side_by_side import Worker, parser_of, sluice, temporary_folder

MIB = 1 << 20
WAYS = ("write", "read")
# The settings to try, in this order, each with the best values of the previous ones.
START = {"block_size": MIB, "queue_depth": 32, "single_submit": False, "overlap_events": True, "intra_op_parallelism": 1,
         "call": 0}
TUNED = {
    "block_size": [MIB // 4, MIB // 2, MIB, 4 * MIB, 8 * MIB],
    "queue_depth": [8, 16, 32, 128],
    "call": [0, 16 * MIB, 64 * MIB],  # 0 means the whole file
    "intra_op_parallelism": [1, 2, 4],
    "single_submit": [False, True],
    "overlap_events": [False, True],
}


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to measure", bytes=1 << 30, rounds=3, seconds=8.0)
    parser.add_argument("--deepspeed-python", help="the Python of an environment with DeepSpeed; without it DeepSpeed is left out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


class Handle:
    """DeepSpeed's side, in a process of its own. Reads or writes a file once, one call after another."""

    def __init__(self, path, size):
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.module, self.path, self.size = AsyncIOBuilder().load(verbose=False), path, size
        allocator = self.module.aio_handle()
        self.buffer = allocator.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
        self.buffer.random_(0, 256)
        self.allocator = allocator  # owns the buffer's memory

    def rate(self, way, setting):
        options = {key: value for key, value in setting.items() if key != "call"}
        handle = self.module.aio_handle(**options)
        call = setting["call"] or self.size
        part = self.buffer[:call]
        move = handle.sync_pwrite if way == "write" else handle.sync_pread
        begin = time.perf_counter()
        for offset in range(0, self.size, call):
            move(part, self.path, offset)
        return self.size / (time.perf_counter() - begin)


def work(path, size):
    """Answers on the original standard output. The output of libraries goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        handle = Handle(path, size)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(handle.rate(command["way"], command["setting"])), file=answers, flush=True)


class DeepSpeed(Worker):
    def __init__(self, python, path, size):
        super().__init__("DeepSpeed's process", [python, __file__, "--disk", path.parent, "--worker", path, "--bytes", size])
        self.best = {}

    def tune(self):
        self.rate("write", START)  # to make the file
        self.best = {way: self.tuned(way) for way in WAYS}

    def rate(self, way, setting):
        return self.answer_to({"way": way, "setting": setting})

    def tuned(self, way):
        best, most = dict(START), 0
        for key, values in TUNED.items():
            for value in values:
                setting = {**best, key: value}
                if (rate := self.rate(way, setting)) > most:
                    best, most = setting, rate
        return best


def sluice_round(a):
    report = json.loads(sluice("bench", "disk", a.disk, "--size", a.bytes, "--seconds", a.seconds, "--json"))
    if "fio" not in report["settings"]:
        raise SystemExit("; ".join(report["notes"]))
    return report


def one_round(a, deepspeed):
    report = sluice_round(a)
    rows = {way: [row for row in report["rows"] if row["name"] == way] for way in WAYS}
    found = {way: {"sluice": rows[way][0]["reached"], "fio": rows[way][-1]["limit"], "no checksums": rows[way][0]["limit"]}
             for way in WAYS}
    if deepspeed:
        for way in WAYS:
            found[way]["deepspeed"] = max(deepspeed.rate(way, deepspeed.best[way]) for _ in range(2))
    return found, report["settings"]


def summary(rounds, settings, deepspeed):
    result = {"settings": settings, "deepspeed": deepspeed.best if deepspeed else None}
    for way in WAYS:
        sides = rounds[0][way]
        medians = {side: statistics.median(found[way][side] for found in rounds) for side in sides}
        ratios = {side: statistics.median(found[way]["sluice"] / found[way][side] for found in rounds) for side in sides}
        result[way] = {"bytes_per_second": medians, "ratios": ratios}
    return result


def main():
    a = arguments()
    if a.worker:
        return work(a.worker, a.bytes)
    with temporary_folder(a.disk) as folder, contextlib.ExitStack() as stack:
        deepspeed = None
        if a.deepspeed_python:
            deepspeed = stack.enter_context(DeepSpeed(a.deepspeed_python, folder / "stream", a.bytes))
            deepspeed.tune()
        rounds = []
        for number in range(a.rounds):
            found, settings = one_round(a, deepspeed)
            rounds.append(found)
            text = "; ".join(f"{way} " + ", ".join(f"{side} {rate / 1e9:.2f}" for side, rate in found[way].items()) for way in WAYS)
            print(f"round {number + 1}/{a.rounds}: {text}", file=sys.stderr)
    result = summary(rounds, settings, deepspeed)
    if a.json:
        print(json.dumps(result))
        return None
    for way in WAYS:
        rates, ratios = result[way]["bytes_per_second"], result[way]["ratios"]
        print(f"{way}: " + ", ".join(f"{side} {rates[side] / 1e9:.2f} GB/s ({ratios[side]:.2f})" for side in rates))
    print(f"settings: {json.dumps(result['settings'])}\nDeepSpeed: {json.dumps(result['deepspeed'])}")
    return None


if __name__ == "__main__":
    main()
