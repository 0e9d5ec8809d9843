#!/usr/bin/env python3
"""Measures the savings and the costs of narrow training: bf16 parameters without masters (stochastic rounding) and 8-bit AdamW
state, 4 bytes a parameter, beside f32 with f32 state. It measures bytes on disk, bytes that a step moves, seconds of a step,
peak memory, and the loss over the steps, on the same text, batch, budget and disk. One side runs after the other; figures are
medians of the steps after the first. --json prints JSON.

The model keeps its own vocabulary; the text's bytes are its tokens, so that no tokenizer is needed.

    python3 bench/python/narrow_vs_f32.py --disk FOLDER --text TEXT --model gpt2-1.5b
"""
import json
import pathlib
import statistics
import sys

from side_by_side import options_of, parser_of, rows_of, sluice, sluice_steps, tell, temporary_folder, write_tokens

SIDES = {"f32": ["--dtype", "f32", "--state", "f32"], "bf16 + 8-bit": ["--dtype", "bf16", "--master", "none", "--state", "8bit"]}


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to use", model="gpt2-1.5b", memory="4GiB", swap="30GiB", batch=1,
                       seq=128, steps=50, lr=1e-4)
    parser.add_argument("--text", required=True, type=pathlib.Path, help="a text file to learn from")
    a = parser.parse_args()
    if a.steps < 2:
        parser.error("--steps: the first is not counted, so give at least 2")
    return a


def run(a, side, tokens, folder):
    """Returns one side's measurements. Both sides have everything on disk, even if it would fit in memory."""
    # Without clipping by the norm each gradient is used in the backward pass, and never stored.
    options = [*options_of(a, "model", "memory", "batch", "seq", "steps", "lr"), "--data", tokens, "--disk", f"{a.disk}:{a.swap}",
               "--warmup", min(10, a.steps // 2), "--clip", 0, "--place-parameters", "disk", "--place-state", "disk", *SIDES[side]]
    plan = json.loads(sluice("plan", *options, "--json"))
    seconds = [row["seconds"] for row in sluice_steps(folder, *options)]
    rows = rows_of(folder / "metrics.jsonl")
    return {"side": side, "disk": plan["disk"], "read": rows[-1]["disk_read"], "written": rows[-1]["disk_written"],
            "seconds": statistics.median(seconds), "quickest": min(seconds), "predicted_seconds": plan["step"]["seconds"],
            "peak": rows[-1]["peak_memory"], "predicted_peak": plan["predicted_peak"], "losses": [row["loss"] for row in rows]}


def show(results):
    print(f"{'':14}{'disk':>10}{'read':>10}{'written':>10}{'a step':>9}{'quickest':>10}{'plan':>8}{'peak':>11}{'plan':>11}")
    for r in results:
        print(f"{r['side']:14}{r['disk'] / 1e9:7.2f} GB{r['read'] / 1e9:7.2f} GB{r['written'] / 1e9:7.2f} GB{r['seconds']:7.2f} s"
              f"{r['quickest']:8.2f} s{r['predicted_seconds']:6.1f} s{r['peak'] / 2**20:7.0f} MiB{r['predicted_peak'] / 2**20:7.0f} MiB")
    print(f"\n{'loss of step':14}" + "".join(f"{r['side']:>14}" for r in results))
    count = len(results[0]["losses"])
    for step in sorted({1, 2, 5, *range(10, count + 1, 10), count}):
        if step <= count:
            print(f"{step:<14}" + "".join(f"{r['losses'][step - 1]:14.4f}" for r in results))


def main():
    a = arguments()
    results = []
    with temporary_folder(a.disk) as folder:
        tokens = write_tokens(folder / "tokens.bin", a.text.read_bytes())
        for side in SIDES:
            results.append(run(a, side, tokens, folder))
            print(f"{side}: {results[-1]['seconds']:.2f} s a step", file=sys.stderr)
    tell(a, results, show)


if __name__ == "__main__":
    main()
