#!/usr/bin/env python3
"""Trains models of their real shapes, with random weights, each in a process of its own. They are built on the meta device, and wrapped with
memory and disk as the only settings. It prints the stated memory, the process's resident peak, the predicted memory, PyTorch's part of it, and
warnings; or why the model was refused. The exit status is 1 where a peak exceeded the stated memory, or there was a warning.

With --compare a model is also trained with everything in memory, and the losses of both must have the same bits, else the exit status is 1; the
batch is given as a sample, so that the first plan is made for it. --json prints JSON.

    .venv/bin/python bench/python/wrap_in_budget.py --disk FOLDER [--cases gpt2-774m:3.5GiB,vit-base:2GiB] [--steps 3]
    .venv/bin/python bench/python/wrap_in_budget.py --disk FOLDER --compare --batch 2 --steps 2
"""
import argparse
import json
import subprocess
import sys
import time
import warnings

from side_by_side import ROOT, SHAPES, gpt2_config, parser_of, peak_bytes

sys.path.insert(0, str(ROOT / "bindings" / "python"))
CASES = "gpt2-774m:3.5GiB,gpt2-774m:2GiB,vit-base:3.5GiB,vit-base:2GiB,llama-128k:4GiB"
COMPARED = "bert-large:2600MiB,vit-base:1250MiB,t5-base:2300MiB,llama-0.5b:4200MiB,llama-3-vocabulary:3500MiB"  # below their state's size
OPTIMIZERS = {"adamw": "AdamW", "adafactor": "Adafactor"}
LLAMA = {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20, "num_key_value_heads": 4}
# By name: the model of transformers, and its configuration.
MODELS = {
    "vit-base": ("ViTForImageClassification", {"num_labels": 1000, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "resnet-50": ("ResNetForImageClassification", {"num_labels": 1000}),
    "bert-large": ("BertForMaskedLM", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
                                       "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5-base": ("T5ForConditionalGeneration", {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
                                               "dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "llama-0.5b": ("LlamaForCausalLM", LLAMA | {"vocab_size": 32000}),
    "llama-128k": ("LlamaForCausalLM", LLAMA | {"vocab_size": 128256}),
    # Its embedding and its head span several units each.
    "llama-3-vocabulary": ("LlamaForCausalLM", {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 16,
                                                "num_key_value_heads": 4, "vocab_size": 128256}),
}  # fmt: skip


def arguments():
    parser = parser_of(__doc__, disk="a folder for what does not fit", batch=1, seq=128, steps=3)
    parser.add_argument("--cases", help=f"models with their budgets, by default {CASES}, and with --compare {COMPARED}")
    parser.add_argument("--loss", choices=("inside", "outside"), default="inside", help="whether the loss is computed inside of the model's forward")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--compare", action="store_true", help="also train with everything in memory")
    parser.add_argument("--one", choices=("memory", "budget"), help=argparse.SUPPRESS)  # the one case, in this process
    a = parser.parse_args()
    a.cases = a.cases or (COMPARED if a.compare else CASES)
    return a


def made(name, batch, seq):
    """Returns a model on the meta device, the arguments to call it with, and labels."""
    import torch
    import transformers

    if name in SHAPES:
        kind, config = transformers.GPT2LMHeadModel, gpt2_config(name)
    elif name in MODELS:
        kind = getattr(transformers, MODELS[name][0])
        config = kind.config_class(**MODELS[name][1])
    else:
        raise SystemExit(f"there is no model '{name}'; choose one of {', '.join([*MODELS, *SHAPES])}")
    with torch.device("meta"):
        model = kind(config)
    drawn = torch.Generator().manual_seed(5)
    if name in ("vit-base", "resnet-50"):
        return model, {"pixel_values": torch.randn(batch, 3, 224, 224, generator=drawn)}, torch.arange(batch)
    ids = torch.randint(0, config.vocab_size, (batch, seq), generator=drawn)
    return model, {"input_ids": ids}, ids


def loss_of(model, given, labels, a):
    import torch

    if a.loss == "inside":
        return model(**given, labels=labels).loss
    logits = model(**given).logits
    if logits.dim() == 3:
        logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def run(a):
    import sluice

    try:
        train(a)
    except sluice.BudgetError as error:
        print(json.dumps({"refused": str(error), "measured": peak_bytes()}))


def train(a):
    import torch

    import sluice.torch

    name, memory = a.cases.split(":")
    torch.manual_seed(11)
    model, given, labels = made(name, a.batch, a.seq)
    where = {"memory": "20GiB", "place": "memory"} if a.one == "memory" else {"memory": memory, "disk": a.disk}
    if a.compare:
        where["sample_batch"] = given | {"labels": labels}
    seconds, losses = [time.perf_counter()], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        model, optimizer = sluice.torch.wrap(model, getattr(sluice, OPTIMIZERS[a.optimizer])(lr=1e-4), **where)
        seconds = [time.perf_counter() - seconds[0]]
        for _ in range(a.steps):
            start = time.perf_counter()
            loss = loss_of(model, given, labels, a)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            print(f"{name}: step of {seconds[-1]:.1f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    plan = sluice.torch.engine_of(model).plan()
    print(json.dumps({
        "model": name, "memory": memory, "parameters": sum(p.numel() for p in model.parameters()), "stated": plan["budget"]["memory"],
        "predicted": plan["predicted_peak"], "measured": peak_bytes(), "pytorch": plan["pytorch"], "seconds": seconds,
        "losses": [loss.hex() for loss in losses], "warnings": [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)],
    }))  # fmt: skip


def in_own_process(a, case, place):
    command = [sys.executable, __file__, "--one", place, "--disk", a.disk, "--cases", case, "--batch", str(a.batch), "--seq", str(a.seq),
               "--steps", str(a.steps), "--loss", a.loss, "--optimizer", a.optimizer,
               *["--compare"] * a.compare]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"{case} failed")
    return json.loads(finished.stdout.splitlines()[-1])


def in_mib(size):
    return "none" if size is None else f"{size >> 20}"


def line(r):
    within = "within" if r["measured"] <= r["stated"] else "PASSED"
    equal = {None: "", True: "losses equal to the last bit in memory; ", False: "losses DIFFERENT in memory; "}[r.get("equal")]
    return (f"{r['model']} ({r['parameters'] / 1e6:.0f}M parameters, {16 * r['parameters'] >> 20} MiB of AdamW's state) in {r['memory']}: "
            f"{in_mib(r['stated'])} MiB stated, {in_mib(r['predicted'])} predicted, {in_mib(r['measured'])} measured ({within}); PyTorch: "
            f"{in_mib(r['pytorch']['peak'])} estimated, {in_mib(r['pytorch']['reserve'])} planned, {in_mib(r['pytorch']['measured'])} measured; "
            f"wrap() {r['seconds'][0]:.1f} s, steps {', '.join(f'{s:.1f}' for s in r['seconds'][1:])} s; {equal}{r['warnings'] or 'no warning'}")


def main():
    a = arguments()
    if a.one:
        return run(a)
    good = True
    for case in a.cases.split(","):
        r = in_own_process(a, case, "budget")
        if "refused" in r:
            print(json.dumps(r) if a.json else f"{case}: refused at {r['measured'] >> 20} MiB: {r['refused']}", flush=True)
            continue
        if a.compare:
            r["equal"] = in_own_process(a, case, "memory").get("losses") == r["losses"]
        good = good and r["measured"] <= r["stated"] and not r["warnings"] and r.get("equal", True)
        print(json.dumps(r) if a.json else line(r), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
