#!/usr/bin/env python3
"""Compares the tokens per second of a training step: Sluice in memory, and PyTorch eager with fused AdamW.

Both train GPT-2 with the same shapes, batch, type (f32), threads, clipping and data. Rounds alternate. Each figure is the median
over the steps of all rounds without the first step of each. --json prints JSON.

    .venv/bin/python bench/python/step_vs_pytorch.py --model gpt2-124m --batch 4 --seq 256
"""
import importlib.metadata
import statistics

from side_by_side import CORES, make_tokens, options_of, parser_of, ran_by_turns, sluice_steps, tell, temporary_folder
from turns import Side


def arguments():
    return parser_of(__doc__, shapes=True, model="gpt2-124m", batch=4, seq=256, threads=CORES, rounds=3, steps=4, memory="12GiB").parse_args()


def main():
    a = arguments()
    with temporary_folder() as folder, Side(a, "plain", folder) as plain:
        words = [*options_of(a, "model", "memory", "batch", "seq", "steps", "threads"), "--clip", 1.0]
        words += ["--data", make_tokens(folder / "tokens.bin", 64 * a.batch * a.seq)]
        found = ran_by_turns({"sluice": lambda: [row["seconds"] for row in sluice_steps(folder, *words)],
                              "pytorch": lambda: plain.steps(a.steps)["seconds"][1:]}, a.rounds)
    seconds = {side: [second for times in rounds for second in times] for side, rounds in found.items()}
    rate = {side: a.batch * a.seq / statistics.median(times) for side, times in seconds.items()}
    result = {"model": a.model, "batch": a.batch, "seq": a.seq, "threads": a.threads, "seconds": seconds, "tokens_per_second": rate,
              "ratio": rate["sluice"] / rate["pytorch"], "torch": importlib.metadata.version("torch")}
    tell(a, result, lambda result: print(f"{a.model} f32, batch {a.batch} x {a.seq}, {a.threads} threads: sluice {rate['sluice']:.1f} tokens/s, "
                                         f"PyTorch {result['torch']} {rate['pytorch']:.1f}, ratio {result['ratio']:.2f}"))


if __name__ == "__main__":
    main()
