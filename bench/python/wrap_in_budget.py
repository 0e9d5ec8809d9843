#!/usr/bin/env python3
"""Trains models of their real shapes, each in a process of its own. They are built on the meta device, and wrapped with memory and
disk as the only settings. It prints the stated memory, the process's resident peak, the predicted memory, PyTorch's part of it, and
warnings; or why the model was refused. The exit status is 1 where a peak exceeded the stated memory, or there was a warning.

    .venv/bin/python bench/python/wrap_in_budget.py --disk FOLDER [--cases gpt2-774m:3.5GiB,vit-base:2GiB] [--steps 3]
"""
import json
import subprocess
import sys
import time
import warnings

from side_by_side import ROOT, SHAPES, gpt2_config, parser_of, peak_bytes

sys.path.insert(0, str(ROOT / "bindings" / "python"))
CASES = "gpt2-774m:3.5GiB,gpt2-774m:2GiB,vit-base:3.5GiB,vit-base:2GiB,llama-128k:4GiB"


def arguments():
    parser = parser_of(__doc__, disk="a folder for what does not fit", cases=CASES, batch=1, seq=128, steps=3)
    parser.add_argument("--loss", choices=("inside", "outside"), default="inside", help="whether the loss is computed inside of the model's forward")
    parser.add_argument("--one", action="store_true", help="run the one case in this process")
    return parser.parse_args()


def made(name, batch, seq):
    """Returns a model on the meta device, the arguments to call it with, and labels."""
    import torch
    import transformers as t

    with torch.device("meta"):
        if name == "vit-base":
            model = t.ViTForImageClassification(t.ViTConfig(num_labels=1000))
        elif name == "llama-128k":
            model = t.LlamaForCausalLM(t.LlamaConfig(
                hidden_size=1280, intermediate_size=3456, num_hidden_layers=20, num_attention_heads=20,
                num_key_value_heads=4, vocab_size=128256,
            ))  # fmt: skip
        elif name in SHAPES:
            model = t.GPT2LMHeadModel(gpt2_config(name))
        else:
            raise SystemExit(f"there is no model '{name}'; choose one of vit-base, llama-128k, {', '.join(SHAPES)}")
    if name == "vit-base":
        return model, {"pixel_values": torch.randn(batch, 3, 224, 224)}, torch.randint(0, 1000, (batch,))
    ids = torch.randint(0, model.config.vocab_size, (batch, seq))
    return model, {"input_ids": ids}, ids


def loss_of(model, given, labels, loss):
    if loss == "inside":
        return model(**given, labels=labels).loss
    import torch

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
    model, given, labels = made(name, a.batch, a.seq)
    wrapped_at = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        model, optimizer = sluice.torch.wrap(model, sluice.AdamW(lr=1e-4), memory=memory, disk=a.disk)
        seconds = [time.perf_counter() - wrapped_at]
        for _ in range(a.steps):
            start = time.perf_counter()
            loss = loss_of(model, given, labels, a.loss)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            print(f"{name}: step of {seconds[-1]:.1f} s, loss {loss.item():.4f}", file=sys.stderr, flush=True)
    plan = sluice.torch.engine_of(model).plan()
    print(json.dumps({
        "model": name, "memory": memory, "stated": plan["budget"]["memory"], "predicted": plan["predicted_peak"],
        "measured": peak_bytes(), "pytorch": plan["pytorch"], "seconds": seconds,
        "warnings": [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)],
    }))  # fmt: skip


def in_own_process(a, case):
    command = [sys.executable, __file__, "--one", "--disk", a.disk, "--cases", case, "--batch", str(a.batch)]
    command += ["--seq", str(a.seq), "--steps", str(a.steps), "--loss", a.loss]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"{case} failed")
    return json.loads(finished.stdout.splitlines()[-1])


def in_mib(size):
    return "none" if size is None else f"{size >> 20}"


def main():
    a = arguments()
    if a.one:
        return run(a)
    good = True
    for case in a.cases.split(","):
        r = in_own_process(a, case)
        if "refused" in r:
            print(json.dumps(r) if a.json else f"{case}: refused at {r['measured'] >> 20} MiB: {r['refused']}", flush=True)
            continue
        within = r["measured"] <= r["stated"]
        good = good and within and not r["warnings"]
        taken = r["pytorch"]
        print(json.dumps(r) if a.json else (
            f"{r['model']} in {r['memory']}: {in_mib(r['stated'])} MiB stated, {in_mib(r['predicted'])} predicted, "
            f"{in_mib(r['measured'])} measured ({'within' if within else 'PASSED'}); PyTorch: {in_mib(taken['peak'])} estimated, "
            f"{in_mib(taken['reserve'])} planned, {in_mib(taken['measured'])} measured; wrap() {r['seconds'][0]:.1f} s, steps "
            f"{', '.join(f'{s:.1f}' for s in r['seconds'][1:])} s; {r['warnings'] or 'no warning'}"
        ), flush=True)  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
