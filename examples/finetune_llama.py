#!/usr/bin/env python3
"""Fine-tunes a Hugging Face Llama with transformers.Trainer, in the memory that is stated.

python finetune_llama.py llama-3.2-1b texts.txt --memory 4GiB --disk /nvme --out tuned
"""

import argparse
import pathlib

import torch
import transformers

import sluice
import sluice.torch


class Pieces(torch.utils.data.Dataset):
    """A text, cut into pieces of `length` tokens."""

    def __init__(self, ids, length):
        self.pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def tokens_of(folder, text, length):
    """With the folder's tokenizer, more than `length`; a model without one reads bytes."""
    if (folder / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids = torch.tensor(tokenizer(text.read_text())["input_ids"])
    else:
        ids = torch.tensor(list(text.read_bytes()))
    if len(ids) <= length:
        raise SystemExit(f"'{text}' has {len(ids)} tokens; give a longer one, or a --seq below that")
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="config.json and *.safetensors")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--memory", default="4GiB", help="of the whole process")
    parser.add_argument("--disk", help="a folder for what does not fit in memory")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tuned"))
    a = parser.parse_args()

    ids = tokens_of(a.folder, a.text, a.seq)
    # The values go from the files to where they belong: the model may be larger than memory. Its type is the folder's; a
    # bfloat16 model is trained so, with f32 masters.
    model, optimizer = sluice.torch.from_pretrained(
        a.folder, sluice.AdamW(lr=2e-5), memory=a.memory, disk=a.disk, reserve="1GiB"
    )
    settings = transformers.TrainingArguments(
        output_dir=str(a.out),
        per_device_train_batch_size=a.batch,
        max_steps=a.steps,
        logging_steps=10,
        save_strategy="no",  # the model is saved below, once; Trainer's checkpoints, to go on from, work too
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, a.steps // 10, a.steps)
    data = Pieces(ids, a.seq)
    transformers.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, schedule)).train()
    model.save_pretrained(a.out)
    print(f"saved in {a.out}")


if __name__ == "__main__":
    main()
