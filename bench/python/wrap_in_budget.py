#!/usr/bin/env python3
"""Trains a GPT-2 that was built on the meta device in a stated budget, wrapped, and prints what was predicted and what
the process took at most. Run it in a memory cgroup to see that nothing else decides.

    .venv/bin/python bench/python/wrap_in_budget.py --disk FOLDER --model gpt2-774m --memory 4000MiB
"""
import json
import sys
import time

from side_by_side import ROOT, gpt2_config, parser_of, peak_bytes

sys.path.insert(0, str(ROOT / "bindings" / "python"))


def arguments():
    return parser_of(__doc__, disk="a folder for what does not fit", shapes=True, model="gpt2-774m", memory="4000MiB", batch=1,
                     seq=128, steps=3).parse_args()


def main():
    a = arguments()
    import torch
    from transformers import GPT2LMHeadModel

    import sluice.torch

    with torch.device("meta"):
        model = GPT2LMHeadModel(gpt2_config(a.model))
    ids = torch.randint(0, 50257, (a.batch, a.seq))
    model, optimizer = sluice.torch.wrap(
        model, sluice.AdamW(lr=1e-4), memory=a.memory, disk=a.disk, sample_batch={"input_ids": ids, "labels": ids}
    )
    predicted = sluice.torch.engine_of(model).plan()["predicted_peak"]
    for step in range(a.steps):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s", file=sys.stderr)
    result = {"model": a.model, "predicted": predicted, "measured": peak_bytes()}
    result["difference"] = result["measured"] / predicted - 1
    if a.json:
        print(json.dumps(result))
    else:
        print(f"{a.model}: {result['measured'] >> 20} MiB measured, {predicted >> 20} MiB predicted ({100 * result['difference']:+.1f}%)")


if __name__ == "__main__":
    main()
