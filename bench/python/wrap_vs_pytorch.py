#!/usr/bin/env python3
"""A wrapped GPT-2 (transformers) beside the plain one with PyTorch's fused AdamW: seconds of a step, in one run.

Three models of the same shapes, batch and type (f32) take turns: plain, wrapped with everything in memory, wrapped with
everything on disk; and fio replays the bytes that a step on disk reads and writes. Medians over the steps of all rounds
but the first. Figures: plain / in memory, and on disk / max(in memory, fio). JSON with --json.

    .venv/bin/python bench/python/wrap_vs_pytorch.py --disk FOLDER --batch 4 --seq 256
"""
import json
import statistics
import sys
import time

from side_by_side import CORES, ROOT, gpt2_config, parser_of, replay, temporary_folder

sys.path.insert(0, str(ROOT / "bindings" / "python"))


def arguments():
    return parser_of(__doc__, disk="a folder on the disk to measure", shapes=True, model="gpt2-124m", batch=4, seq=256,
                     threads=CORES, rounds=4, steps=3).parse_args()


def make(a, place):
    import torch
    from transformers import GPT2LMHeadModel

    import sluice.torch

    torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(gpt2_config(a.model))
    if place is None:
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return sluice.torch.wrap(model, sluice.AdamW(lr=3e-4), memory="20GiB", disk=a.disk, place=place, reserve="4GiB")


def seconds(a, model, optimizer):
    import torch

    times = []
    for _ in range(a.steps):
        ids = torch.randint(0, 50257, (a.batch, a.seq))
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times


def main():
    a = arguments()
    import sluice.torch

    sides = {"plain": make(a, None), "memory": make(a, "memory"), "disk": make(a, "disk")}
    plan = sluice.torch.engine_of(sides["disk"][0]).plan()
    times, fio = {name: [] for name in sides}, []
    with temporary_folder(a.disk) as folder:
        for number in range(a.rounds):
            for side, (model, optimizer) in sides.items():
                taken = seconds(a, model, optimizer)
                times[side] += taken if number else []
            fio.append(replay(folder, plan["step"]["bytes_read"], plan["step"]["bytes_written"]))
            if number:
                found = ", ".join(f"{side} {statistics.median(values):.2f} s" for side, values in times.items())
                print(f"round {number}/{a.rounds - 1}: {found}, fio {fio[-1]:.2f} s", file=sys.stderr)
    result = {side: statistics.median(values) for side, values in times.items()} | {"fio": statistics.median(fio)}
    result |= {
        "speed_in_memory": result["plain"] / result["memory"],
        "disk_ratio": result["disk"] / max(result["memory"], result["fio"]),
        "touches": sluice.torch.engine_of(sides["disk"][0]).counters().touches,
    }
    if a.json:
        print(json.dumps(result))
    else:
        print("{plain:.2f} s plain, {memory:.2f} s in memory ({speed_in_memory:.3f}x), {disk:.2f} s on disk, fio {fio:.2f} s "
              "(ratio {disk_ratio:.3f}); {touches} touches".format(**result))


if __name__ == "__main__":
    main()
