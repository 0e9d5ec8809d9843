#!/usr/bin/env python3
"""Wraps models of their real shapes, with random weights, in budgets below their training state (16 bytes a parameter), and trains
some steps: once with everything in memory, and once in the budget. It prints the losses of both, which must be equal to the last
bit, the predicted memory, and the process's peak.

    .venv/bin/python bench/python/wrap_real_shapes.py --disk FOLDER [--models bert-large,vit-base] [--optimizer adafactor]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from side_by_side import ROOT, peak_bytes

sys.path.insert(0, str(ROOT / "bindings" / "python"))
BUDGETS = {"bert-large": "2600MiB", "vit-base": "1250MiB", "t5-base": "2300MiB", "llama-0.5b": "4200MiB",
           "llama-3-vocabulary": "3500MiB"}  # fmt: skip
OPTIMIZERS = {"adamw": "AdamW", "adafactor": "Adafactor"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", required=True, help="a folder for all that does not fit in memory")
    parser.add_argument("--models", default=",".join(BUDGETS), help="some of " + ", ".join(BUDGETS))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory", help="a budget in place of the model's own, where one model is named")
    parser.add_argument("--one", choices=("memory", "budget"), help=argparse.SUPPRESS)
    return parser.parse_args()


def text(vocabulary, rows=2, length=128):
    import torch

    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids}


def images(rows=1):
    import torch

    pixels = torch.randn(rows, 3, 224, 224, generator=torch.Generator().manual_seed(5))
    return {"pixel_values": pixels, "labels": torch.arange(rows)}


def kind_of(name):
    """Returns a model's class and configuration, without dropout."""
    import transformers as t

    if name == "bert-large":
        return t.BertForMaskedLM, t.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    if name == "vit-base":
        return t.ViTForImageClassification, t.ViTConfig(
            num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    if name == "t5-base":
        return t.T5ForConditionalGeneration, t.T5Config(
            d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0, decoder_start_token_id=0
        )
    if name == "llama-3-vocabulary":  # its embedding and its head span several units each
        return t.LlamaForCausalLM, t.LlamaConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
            vocab_size=128256,
        )  # fmt: skip
    return t.LlamaForCausalLM, t.LlamaConfig(
        hidden_size=1280, intermediate_size=3456, num_hidden_layers=20, num_attention_heads=20,
        num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip


def made(name):
    """Returns the model on the meta device, and a batch."""
    import torch

    kind, config = kind_of(name)
    with torch.device("meta"):
        model = kind(config)
    return model, images() if name == "vit-base" else text(config.vocab_size)


def run(name, place, memory, disk, steps, kind):
    import torch

    import sluice.torch

    torch.manual_seed(11)
    model, batch = made(name)
    given = {"memory": "20GiB", "place": "memory"} if place == "memory" else {"memory": memory, "disk": disk}
    settings = getattr(sluice, OPTIMIZERS[kind])(lr=1e-4)
    model, optimizer = sluice.torch.wrap(model, settings, sample_batch=batch, **given)
    plan = sluice.torch.engine_of(model).plan()
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        seconds.append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters, "losses": losses, "seconds": seconds[-1], "measured": peak_bytes(),
                      "predicted": plan["predicted_peak"],
                      "pytorch": sluice.torch.engine_of(model).plan()["pytorch"]}))  # fmt: skip


def in_own_process(a, name, place, memory):
    command = [sys.executable, Path(__file__), "--disk", a.disk, "--models", name, "--steps", str(a.steps)]
    command += ["--one", place, "--memory", memory, "--optimizer", a.optimizer]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"{name}, {place}: {finished.stderr}")
    sys.stderr.write("".join(line + "\n" for line in finished.stderr.splitlines() if "Warning" in line))
    return json.loads(finished.stdout.splitlines()[-1])


def main():
    a = arguments()
    if a.one:
        return run(a.models, a.one, a.memory, a.disk, a.steps, a.optimizer)
    for name in a.models.split(","):
        memory = a.memory or BUDGETS[name]
        whole, tight = (in_own_process(a, name, place, memory) for place in ("memory", "budget"))
        equal = "equal to the last bit" if whole["losses"] == tight["losses"] else "DIFFERENT"
        took, estimated = (tight["pytorch"][key] >> 20 for key in ("measured", "peak"))
        print(
            f"{name}: {whole['parameters'] / 1e6:.0f}M parameters, {16 * whole['parameters'] >> 20} MiB of state, in "
            f"{memory}: {tight['predicted'] >> 20} MiB predicted, {tight['measured'] >> 20} MiB measured "
            f"({100 * (tight['measured'] / tight['predicted'] - 1):+.1f}%), {tight['seconds']:.1f} s a step "
            f"({whole['seconds']:.1f} s in memory), losses {equal} "
            f"({', '.join(f'{float.fromhex(x):.4f}' for x in tight['losses'])}); PyTorch took {took} MiB, "
            f"{estimated} MiB estimated",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
