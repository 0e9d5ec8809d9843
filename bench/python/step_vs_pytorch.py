#!/usr/bin/env python3
"""Compares the tokens per second of a training step: Sluice in memory, and PyTorch eager with fused AdamW.

Both train GPT-2 with the same shapes, batch, type (f32), threads, clipping and data. Rounds alternate. Each figure is the median
over the steps of all rounds without the first step of each. --json prints JSON.

    .venv/bin/python bench/python/step_vs_pytorch.py --model gpt2-124m --batch 4 --seq 256
"""
import json
import pathlib
import statistics
import sys
import tempfile
import time

from side_by_side import CORES, gpt2_config, make_tokens, parser_of, sluice_steps



def arguments():
    return parser_of(__doc__, shapes=True, model="gpt2-124m", batch=4, seq=256, threads=CORES, rounds=3, steps=4,
                     memory="12GiB").parse_args()


def sluice_seconds(a, tokens, folder):
    rows = sluice_steps(folder, "--model", a.model, "--data", tokens, "--memory", a.memory, "--batch", a.batch, "--seq", a.seq,
                        "--steps", a.steps, "--threads", a.threads, "--clip", 1.0)
    return [row["seconds"] for row in rows]


class PyTorch:
    def __init__(self, a):
        import torch
        from transformers import GPT2LMHeadModel
        torch.set_num_threads(a.threads)
        torch.manual_seed(1)
        self.torch, self.a = torch, a
        self.model = GPT2LMHeadModel(gpt2_config(a.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def seconds(self):
        torch, times = self.torch, []
        for _ in range(self.a.steps):
            ids = torch.randint(0, 50257, (self.a.batch, self.a.seq))
            start = time.perf_counter()
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            times.append(time.perf_counter() - start)
        return times[1:]


def main():
    a = arguments()
    tokens_per_step = a.batch * a.seq
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokens = folder / "tokens.bin"
        make_tokens(tokens, 64 * tokens_per_step)
        torch_side = PyTorch(a)
        seconds = {"sluice": [], "pytorch": []}
        for number in range(a.rounds):
            seconds["sluice"] += sluice_seconds(a, tokens, folder)
            seconds["pytorch"] += torch_side.seconds()
            print(f"round {number + 1}/{a.rounds}: sluice {statistics.median(seconds['sluice']):.2f} s a step, "
                  f"pytorch {statistics.median(seconds['pytorch']):.2f} s", file=sys.stderr)
    rate = {side: tokens_per_step / statistics.median(times) for side, times in seconds.items()}
    result = {"model": a.model, "batch": a.batch, "seq": a.seq, "threads": a.threads, "seconds": seconds,
              "tokens_per_second": rate, "ratio": rate["sluice"] / rate["pytorch"], "torch": torch_side.torch.__version__}
    if a.json:
        print(json.dumps(result))
    else:
        print(f"{a.model} f32, batch {a.batch} x {a.seq}, {a.threads} threads: sluice {rate['sluice']:.1f} tokens/s, "
              f"PyTorch {result['torch']} {rate['pytorch']:.1f}, ratio {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
