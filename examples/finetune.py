#!/usr/bin/env python3
"""Fine-tunes a model of transformers in a plain loop, in the memory that is stated.

python finetune.py                                    # a small GPT-2 on a few lines
python finetune.py --model FOLDER --disk /nvme        # your own: config.json and *.safetensors, of any size
"""

import argparse
import pathlib
import tempfile

import torch
from few_lines import pieces, small_gpt2

import sluice
import sluice.torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="a folder of save_pretrained(), with 256 tokens or more")
    parser.add_argument("--memory", default="3GiB", help="of the whole process")
    parser.add_argument("--disk", help="a folder for what does not fit in memory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("finetuned"))
    a = parser.parse_args()

    with tempfile.TemporaryDirectory() as made:
        if a.model is None:
            small_gpt2().save_pretrained(made)
        # The values go from the files to where they belong, so the model may be larger than memory.
        model, optimizer = sluice.torch.from_pretrained(
            a.model or made, sluice.AdamW(lr=1e-3), memory=a.memory, disk=a.disk
        )
        model.train()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, a.steps)
        data = pieces(64)
        for step in range(a.steps):
            batch = data[torch.randint(0, len(data), (4,))]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {step + 1}/{a.steps}: loss {loss.item():.4f}")
        model.save_pretrained(a.out)
    print(f"saved in {a.out}")


if __name__ == "__main__":
    main()
