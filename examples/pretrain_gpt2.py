#!/usr/bin/env python3
"""Trains a GPT-2 from nothing on the bytes of a text, in the memory that is stated.

python pretrain_gpt2.py book.txt --layers 12 --width 768 --memory 2GiB --disk /nvme --out run
"""

import argparse
import pathlib

import torch
import transformers

import sluice
import sluice.torch


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--memory", default="2GiB", help="of the whole process")
    parser.add_argument("--disk", help="a folder for what does not fit in memory")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpt2"))
    return parser.parse_args()


def batch_of(text, a):
    starts = torch.randint(0, len(text) - a.seq, (a.batch,)).tolist()
    ids = torch.stack([text[s : s + a.seq] for s in starts]).long()
    return {"input_ids": ids, "labels": ids}


def main():
    a = arguments()
    text = torch.frombuffer(bytearray(a.text.read_bytes()), dtype=torch.uint8)
    if len(text) <= a.seq:
        raise SystemExit(f"'{a.text}' has {len(text)} bytes; give a longer one, or a --seq below that")
    config = transformers.GPT2Config(
        n_layer=a.layers, n_embd=a.width, n_head=a.width // 64, vocab_size=256, n_positions=a.seq,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    # On the meta device it takes no memory; wrap() initialises it unit by unit, where it belongs.
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    model, optimizer = sluice.torch.wrap(
        model,
        sluice.AdamW(lr=3e-4, weight_decay=0.1),
        memory=a.memory,
        disk=a.disk,
        sample_batch=batch_of(text, a),  # so that what PyTorch itself takes is in the plan
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=a.steps)
    for step in range(a.steps):
        for _ in range(a.accumulate):
            loss = model(**batch_of(text, a)).loss / a.accumulate
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step + 1 == a.steps:
            print(f"step {step + 1}/{a.steps}: loss {loss.item() * a.accumulate:.4f}, gradient norm {norm.item():.2f}")
    model.save_pretrained(a.out)  # transformers loads it
    sluice.torch.engine_of(model).save(a.out / "checkpoint")  # with the optimizer's state, to go on from
    print(f"saved in {a.out}")


if __name__ == "__main__":
    main()
