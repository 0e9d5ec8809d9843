#!/usr/bin/env python3
"""LoRA on a model that is larger than memory: its own parameters stay on disk and are only read; the adapters train.

python lora.py llama-8b texts.txt --memory 4GiB --disk /nvme --out adapter
"""

import argparse
import pathlib

import peft
import torch
import transformers
from finetune_llama import tokens_of

import sluice
import sluice.torch


def adapted(folder):
    """The model with its adapters, on the meta device: in the type that its files have, and adapters in f32."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"'{folder}' has no config.json; give a folder that save_pretrained() wrote")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        return peft.get_peft_model(
            base, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="a Llama: config.json and *.safetensors")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--memory", default="4GiB", help="of the whole process")
    parser.add_argument("--disk", help="a folder for what does not fit in memory")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("adapter"))
    a = parser.parse_args()

    ids = tokens_of(a.folder, a.text, a.seq)
    first = ids[: a.seq].unsqueeze(0)
    model, optimizer = sluice.torch.wrap(
        adapted(a.folder),
        sluice.AdamW(lr=1e-3, weight_decay=0.0),
        memory=a.memory,
        disk=a.disk,
        sample_batch={"input_ids": first, "labels": first},
        weights=a.folder,  # what the files have; the adapters begin by their own rules
    )
    for step in range(a.steps):
        start = int(torch.randint(0, len(ids) - a.seq, ()))
        piece = ids[start : start + a.seq].unsqueeze(0)
        loss = model(input_ids=piece, labels=piece).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step + 1 == a.steps:
            print(f"step {step + 1}/{a.steps}: loss {loss.item():.4f}")
    model.save_pretrained(a.out)  # the adapters alone
    print(f"saved in {a.out}")


if __name__ == "__main__":
    main()
