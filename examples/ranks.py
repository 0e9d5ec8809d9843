#!/usr/bin/env python3
"""Trains a small GPT-2 with several ranks, each of which holds a part of the optimizer's state.

torchrun --nproc-per-node 2 ranks.py
torchrun --nproc-per-node 2 ranks.py --device-memory 4GiB
"""

import argparse

import torch
from few_lines import pieces, small_gpt2

import sluice
import sluice.torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="3GiB", help="of each rank")
    parser.add_argument("--disk", help="a folder for what does not fit in memory")
    parser.add_argument("--device-memory", help="of each rank's GPU; without it the CPU computes")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in a step, of all ranks together")
    a = parser.parse_args()

    data = pieces(64)
    # wrap() finds the ranks that torchrun has started; without torchrun this process trains alone.
    model, optimizer = sluice.torch.wrap(
        small_gpt2(),
        sluice.AdamW(lr=1e-3),
        memory=a.memory,
        disk=a.disk,
        device_memory=a.device_memory,
        device="cuda" if a.device_memory else None,  # this rank's GPU
        stage=1,
        accumulate=a.accumulate,
    )
    device = next(model.parameters()).device
    batches = sluice.torch.MicroBatches(data, batch=4, accumulate=a.accumulate)  # those of this rank
    losses = 0.0
    for number, ids in enumerate(torch.utils.data.DataLoader(data, batch_sampler=batches), 1):
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids).loss / batches.of_rank
        loss.backward()  # gradients are the mean over the ranks
        losses += loss.item()
        if number % batches.of_rank == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {number // batches.of_rank}: loss of this rank's micro-batches {losses:.4f}")
            losses = 0.0
    sluice.torch.close(model)  # all ranks do so


if __name__ == "__main__":
    main()
