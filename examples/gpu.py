#!/usr/bin/env python3
"""Trains a model on a GPU, in a stated part of its memory: the rest of the model lies in the host's memory and on disk.

python gpu.py --device-memory 4GiB --memory 8GiB
"""

import argparse

import torch
from few_lines import pieces, small_gpt2

import sluice
import sluice.torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-memory", default="4GiB", help="of the GPU, PyTorch's and CUDA's own included")
    parser.add_argument("--memory", default="3GiB", help="of the host")
    parser.add_argument("--disk", help="a folder for what fits in neither")
    parser.add_argument("--steps", type=int, default=20)
    a = parser.parse_args()

    data = pieces(64)
    try:
        # The model stays on the CPU until it goes to the GPU unit by unit, so it may be larger than the GPU.
        model, optimizer = sluice.torch.wrap(
            small_gpt2(),
            sluice.AdamW(lr=1e-3),
            device="cuda",
            device_memory=a.device_memory,
            memory=a.memory,
            disk=a.disk,
            sample_batch={"input_ids": data[:4], "labels": data[:4]},
        )
    except sluice.Error as error:  # there is no GPU, or too little memory: the text says what to do
        raise SystemExit(f"gpu.py: {error}") from None
    device = next(model.parameters()).device
    for step in range(a.steps):
        batch = data[torch.randint(0, len(data), (4,))].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{a.steps}: loss {loss.item():.4f}")
    model.save_pretrained("trained")  # the values of all units, wherever they lie
    print("saved in trained")


if __name__ == "__main__":
    main()
