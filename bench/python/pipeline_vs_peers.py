#!/usr/bin/env python3
"""Compares pipelines of as many stages as this machine has cores, one thread each, that train a GPT-2 without a tied head:
`sluice train --mesh pipeline=P` with 1F1B, GPipe, ZB-H1 and interleaved (two chunks a stage); and, with the first two, the model of
transformers in sluice.torch.Pipeline (also with a tied head) and in torch.distributed.pipelining over Gloo; and beside them one rank of
Sluice with as many threads, which computes as much without a bubble.

    sluice half ...  one of Sluice's orders ("sluice half 1f1b") with the disk, and half of the memory that a rank of PyTorch's 1F1B took in
                     this round as the budget
    sluice narrow    with --dtype bf16: 1F1B, with parameters and the optimizer's state in bf16 without masters
    torch narrow     with --dtype bf16: the same, which is the least that PyTorch can do
    products         with f32: an equal share for each rank of the matrix products of the linear layers alone, by oneDNN, without a bubble:
                     what a step cannot go below

With bf16 the other sides keep f32 values: Sluice as masters; PyTorch and wrapped models compute by autocast.

Sides have the same shapes, micro-batches and optimizer, and take turns; each round has processes of its own, whose first step is not
counted. Figures are medians. Memory is the greatest peak of a rank (VmHWM). The cut is Sluice's, and PyTorch's stages have the same
blocks. --sides "torch 1f1b,wrapped 1f1b" runs these alone. --json prints JSON.

    .venv/bin/python bench/python/pipeline_vs_peers.py --rounds 2 --steps 3
"""
import contextlib
import json
import os
import sys
import time

from products_alone import products_side
from side_by_side import (CORES, ROOT, SHAPES, add_half, gpt2_config, make_tokens, medians, options_of, parser_of, peak_bytes, ran_by_turns,
                          sluice, sluice_ranks, temporary_folder, torch_ranks)

ORDERS = {"1f1b": (), "gpipe": (), "zb-h1": (), "interleaved": ("--pipeline", "1f1b", "--chunks", 2)}
ORDERS_OF_TORCH = ("1f1b", "gpipe")  # its other schedules have several stages on each rank


def arguments():
    parser = parser_of(__doc__, shapes=True, model="gpt2-124m", batch=1, seq=256, micro=8, stages=CORES, rounds=3, steps=4, memory="8GiB",
                       cut="", sides="")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="type of what is computed, by default f32")
    a = parser.parse_args()
    if "sluice half" in a.sides and "torch 1f1b" not in a.sides.split(","):
        parser.error("--sides: 'sluice half ...' has half of the memory of 'torch 1f1b', which must be there, too")
    return a


def shape_of(a, folder, tokens):
    return ("--model", folder / "model", "--data", tokens, *options_of(a, "batch", "seq", "dtype"), "--accumulate", a.micro)


def cut_of(a, order):
    words = ORDERS[order] or ("--pipeline", order, *(("--stages", a.cut) if a.cut else ()))
    return ("--mesh", f"pipeline={a.stages}", "--threads", 1, *words)


def sluice_side(a, folder, tokens, *more, memory=None):
    return sluice_ranks(folder, *shape_of(a, folder, tokens), "--memory", memory or a.memory, "--steps", a.steps + 1, *more)


def torch_side(a, side, order, ends, tied=False, narrow=False):
    return torch_ranks(__file__, a.stages, {"side": side, "model": a.model, "batch": a.batch, "seq": a.seq, "micro": a.micro, "steps": a.steps,
                                            "order": order, "ends": ends, "stages": a.stages, "memory": a.memory, "tied": tied,
                                            "dtype": a.dtype, "narrow": narrow})


def linears_of(a):
    """Returns the linear layers of a rank that has an equal share of them, as products_side() takes them."""
    layers, width, _ = SHAPES[a.model]
    rows, words = a.batch * a.seq, gpt2_config(a.model).vocab_size
    return [(layers * a.micro // a.stages, rows, outputs, inputs)
            for outputs, inputs in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))] + [
        (a.micro // a.stages, rows, words, width)]


class OfTorch:
    """A stage of torch.distributed.pipelining."""

    def __init__(self, a):
        import torch
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        rank, stages = int(os.environ["RANK"]), a["stages"]
        whole = model_of(a)

        class Stage(torch.nn.Module):
            def __init__(self):
                super().__init__()
                if rank == 0:
                    self.wte, self.wpe = whole.transformer.wte, whole.transformer.wpe
                self.blocks = whole.transformer.h[a["ends"][rank - 1] if rank else 0:a["ends"][rank]]
                if rank + 1 == stages:
                    self.norm, self.head = whole.transformer.ln_f, whole.lm_head

            def forward(self, x):
                with cast(a):
                    return self.computed(x)

            def computed(self, x):
                if rank == 0:
                    x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
                for block in self.blocks:
                    out = block(x)
                    x = out[0] if isinstance(out, tuple) else out
                return self.head(self.norm(x)) if rank + 1 == stages else x

        def loss_of(logits, targets):
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        self.module = Stage()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-4, fused=True)
        kind = ScheduleGPipe if a["order"] == "gpipe" else Schedule1F1B
        self.schedule = kind(PipelineStage(self.module, rank, stages, torch.device("cpu")), a["micro"], loss_fn=loss_of)
        self.is_first, self.is_last = rank == 0, rank + 1 == stages

    def step(self, tokens):
        import torch

        given = {"target": tokens, "losses": []} if self.is_last else {}
        self.schedule.step(*([tokens] if self.is_first else []), **given)
        # The norm over all stages, as clipping needs it.
        squares = sum(p.grad.square().sum() for p in self.module.parameters())
        torch.distributed.all_reduce(squares)
        torch._foreach_mul_([p.grad for p in self.module.parameters()], min(1.0, 1.0 / (squares.sqrt().item() + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()


class Wrapped:
    """A stage of sluice.torch.Pipeline."""

    def __init__(self, a):
        sys.path.insert(0, str(ROOT / "bindings" / "python"))
        import sluice.torch

        self.settings = a
        firsts = [0, *a["ends"][:-1]]
        cut = ",".join(f"{first}-{end - 1}" for first, end in zip(firsts, a["ends"], strict=True))
        self.pipe = sluice.torch.Pipeline(model_of(a), sluice.AdamW(lr=3e-4), memory=a["memory"], micro_batches=a["micro"],
                                          pipeline=a["order"], stages=cut)

    def step(self, tokens):
        import torch

        targets = torch.full_like(tokens, -100)
        targets[:, 1:] = tokens[:, :-1]  # the model shifts them back, so that the loss equals the other side's
        with cast(self.settings):
            self.pipe.train_step({"input_ids": tokens, "labels": targets}, clip=1.0)


def model_of(a):
    import torch
    from transformers import GPT2LMHeadModel

    config = gpt2_config(a["model"])
    config.tie_word_embeddings = a["tied"]
    torch.manual_seed(1)
    return GPT2LMHeadModel(config).to(torch.bfloat16 if a["narrow"] else torch.float32)


def cast(a):
    """Returns a context in which f32 values are computed in the type of --dtype."""
    import torch

    return torch.autocast("cpu", torch.bfloat16) if a["dtype"] == "bf16" and not a["narrow"] else contextlib.nullcontext()


def run_stage(a):
    """Runs one stage of a pipeline in PyTorch, and reports its seconds and its peak memory."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    side = {"torch": OfTorch, "wrapped": Wrapped}[a["side"]](a)
    seconds = []
    for step in range(a["steps"] + 1):
        tokens = torch.randint(0, 256, (a["micro"] * a["batch"], a["seq"]), generator=torch.Generator().manual_seed(step))
        torch.distributed.barrier()
        begin = time.perf_counter()
        side.step(tokens)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds[1:], "peak": peak_bytes()}))
    torch.distributed.destroy_process_group()


def measure(a, folder):
    (folder / "model").mkdir()
    config = gpt2_config(a.model)
    config.tie_word_embeddings = False
    (folder / "model/config.json").write_text(config.to_json_string())
    tokens = make_tokens(folder / "tokens.bin", 64 * a.micro * a.batch * a.seq)
    planned = json.loads(sluice("plan", "--json", *shape_of(a, folder, tokens), "--memory", a.memory, *cut_of(a, "1f1b")))["pipeline"]
    ends = [stage["units"][0][1] - 1 for stage in planned["stages"]]
    ends[-1] = SHAPES[a.model][0]
    sides = {"alone": lambda: sluice_side(a, folder, tokens, "--threads", a.stages)}
    for order in ORDERS:
        sides[f"sluice {order}"] = lambda order=order: sluice_side(a, folder, tokens, *cut_of(a, order))
        for side in ("wrapped", "torch") if order in ORDERS_OF_TORCH else ("wrapped",) if order == "zb-h1" else ():
            sides[f"{side} {order}"] = lambda side=side, order=order: torch_side(a, side, order, ends)
    if not a.sides or "torch 1f1b" in a.sides.split(","):
        for order in ORDERS:
            add_half(sides, f"sluice half {order}", "torch 1f1b", lambda memory, order=order: sluice_side(
                a, folder, tokens, *cut_of(a, order), "--disk", f"{folder}:16GiB", memory=memory))
    if a.dtype == "bf16":
        sides["sluice narrow"] = lambda: sluice_side(a, folder, tokens, *cut_of(a, "1f1b"), "--state", "bf16", "--master", "none")
        sides["torch narrow"] = lambda: torch_side(a, "torch", "1f1b", ends, narrow=True)
    else:
        sides["products"] = lambda: products_side(a.stages, linears_of(a), a.steps)
    sides["wrapped 1f1b tied"] = lambda: torch_side(a, "wrapped", "1f1b", ends, tied=True)
    if unknown := [name for name in a.sides.split(",") if a.sides and name not in sides]:
        raise SystemExit(f"--sides: '{unknown[0]}' is none; with {a.dtype} there are {', '.join(sides)}")
    sides = {name: side for name, side in sides.items() if not a.sides or name in a.sides.split(",")}
    return {"cut": ends, "planned_step": planned["step_seconds"], "planned_bubble": planned["bubble"],
            "sides": medians(ran_by_turns(sides, a.rounds), a.micro * a.batch * a.seq)}


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_stage(json.loads(sys.argv[2]))
    a = arguments()
    with temporary_folder() as folder:
        result = measure(a, folder)
    if a.json:
        print(json.dumps(result))
        return
    least = (a.micro + a.stages - 1) / a.micro
    print(f"{a.model} untied, {a.dtype}, {a.stages} stages of one thread, {a.micro} micro-batches of {a.batch} x {a.seq}; blocks end at {result['cut']}; "
          f"planned {result['planned_step']:.2f} s, {100 * result['planned_bubble']:.0f}% bubble; equal stages would take {least:.3f} of one rank")
    alone = result["sides"].get("alone", {}).get("seconds")
    for name, side in result["sides"].items():
        share = f" ({side['seconds'] / alone:.3f} of one rank)" if alone else ""
        print(f"{name}: {side['seconds']:.2f} s a step{share}, {side['tokens_per_second']:.0f} tokens/s, "
              f"at most {side['peak'] >> 20} MiB a rank" + (f", waits {side['rank_wait']:.2f} s" if side.get("rank_wait") else ""))


if __name__ == "__main__":
    sys.exit(main())
