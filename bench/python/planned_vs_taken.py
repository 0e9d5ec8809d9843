#!/usr/bin/env python3
"""Compares the seconds of a step that `sluice plan` predicts with those that steps then take, for runs in memory and on disk, in
f32 and bf16, from GPT-2 to a Llama of 8B, with AdamW state in f32 and in 8 bits, with one micro-batch and several. One run follows
the other; figures are medians of the steps after the first. --json prints JSON.

For both sides it prints where a step's seconds go: products and loops, updates, and waiting for the disk.

    python3 bench/python/planned_vs_taken.py --disk FOLDER [RUN ...]
"""
import json
import random
import statistics
import string
import sys

from side_by_side import ROOT, make_tokens, parser_of, sluice, temporary_folder

ON_DISK = ["--place-parameters", "disk", "--place-gradients", "disk", "--place-state", "disk"]
NARROW = ["--dtype", "bf16", "--master", "none", "--state", "8bit", "--clip", 0]
# Tokens of a micro-batch, disk space, steps, and further options.
RUNS = {
    "mini": (1024, "512MiB", 20, ["--model", "mini", "--memory", "176MiB", "--batch", 8, "--seq", 128]),
    "gpt2-124m": (1024, None, 5, ["--model", "gpt2-124m", "--memory", "6GiB", "--batch", 4, "--seq", 256]),
    "gpt2-124m, on disk": (1024, "8GiB", 5, ["--model", "gpt2-124m", "--memory", "3GiB", "--batch", 4, "--seq", 256, *ON_DISK]),
    "gpt2-355m, bf16, 4 micro-batches": (
        256, None, 4, ["--model", "gpt2-355m", "--memory", "8GiB", "--batch", 1, "--seq", 256, "--accumulate", 4, "--dtype", "bf16"]),
    "gpt2-355m, narrow, on disk": (
        128, "12GiB", 6, ["--model", "gpt2-355m", "--memory", "1536MiB", "--batch", 1, "--seq", 128, *NARROW, *ON_DISK]),
    "gpt2-1.5b, on disk": (
        128, "30GiB", 3, ["--model", "gpt2-1.5b", "--memory", "4GiB", "--batch", 1, "--seq", 128, "--clip", 0]),
    "llama-1b, bf16, on disk": (
        512, "20GiB", 4, ["--model", "llama-1b", "--tokens", "bytes", "--memory", "3GiB", "--batch", 1, "--seq", 512, "--dtype",
                          "bf16", *ON_DISK]),
    "llama-8b, narrow, on disk": (
        128, "40GiB", 3, ["--model", "llama-8b", "--tokens", "bytes", "--memory", "4GiB", "--batch", 1, "--seq", 128, *NARROW]),
}


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to use", build=str(ROOT / "build"))
    parser.add_argument("runs", nargs="*", metavar="RUN", help="how the names of the wanted runs begin; the runs are " + "; ".join(RUNS))
    a = parser.parse_args()
    a.runs = [name for name in RUNS if not a.runs or any(name.startswith(word) for word in a.runs)]
    return a


def run(a, name, folder):
    tokens, room, steps, options = RUNS[name]
    data, metrics = folder / "tokens.bin", folder / "metrics.jsonl"
    if "--tokens" in options:
        data = data.with_suffix(".txt")
        data.write_text("".join(random.Random(1).choices(string.ascii_letters, k=64 * tokens)))
    else:
        make_tokens(data, 64 * tokens)
    metrics.unlink(missing_ok=True)
    options = [*options, "--data", data, *(["--disk", f"{a.disk}:{room}"] if room else [])]
    plan = json.loads(sluice("plan", *options, "--json", build=a.build))["step"]
    sluice("train", *options, "--steps", steps, "--metrics", metrics, "--progress", "none", build=a.build)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
    middle = {key: statistics.median(row[key] for row in rows)
              for key in ("seconds", "read_wait_seconds", "write_wait_seconds", "optimizer_seconds")}
    waited = middle["read_wait_seconds"] + middle["write_wait_seconds"]
    result = {"run": name, "planned": plan["seconds"], "taken": middle["seconds"], "ratio": middle["seconds"] / plan["seconds"],
              "least": min(row["seconds"] for row in rows), "most": max(row["seconds"] for row in rows),
              "bound": plan["bound"], "read": rows[-1]["disk_read"], "written": rows[-1]["disk_written"],
              "planned_parts": {key: plan[key] for key in plan if key.endswith("_seconds")},
              "taken_parts": {"compute_seconds": middle["seconds"] - waited - middle["optimizer_seconds"],
                              "optimizer_seconds": middle["optimizer_seconds"], "wait_seconds": waited}}
    return result


def parts(seconds):
    return ", ".join(f"{key.removesuffix('_seconds')} {value:.2f}" for key, value in seconds.items())


def main():
    a = arguments()
    results = []
    with temporary_folder(a.disk) as folder:
        for name in a.runs:
            results.append(r := run(a, name, folder))
            print(f"{name:34}planned {r['planned']:6.2f} s, taken {r['taken']:6.2f} s ({r['least']:.2f} to {r['most']:.2f}), "
                  f"ratio {r['ratio']:.2f}; planned {parts(r['planned_parts'])}; taken {parts(r['taken_parts'])}",
                  file=sys.stderr if a.json else sys.stdout, flush=True)
    if a.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
