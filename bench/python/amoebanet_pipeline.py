#!/usr/bin/env python3
"""Trains a network like the AmoebaNet of GPipe's paper by sluice.torch.Pipeline in two stages under torchrun, and in one process with the same
micro-batches, and compares each process's memory and losses: each stage should take about half of the memory, and the losses must have the
same bits, else the exit status is 1.

The network has a stem, two reduction cells, and three groups of normal cells with a reduction cell between two groups, which halves the
image's sides and doubles the channels. A cell takes the outputs of the two cells before it, so that tuples pass between stages. Its five sums
add separable convolutions, pooling and the cell's inputs; the sums that no other sum takes are concatenated. Batch norm computes its
statistics from each micro-batch.

    557m   18 normal cells, 557M parameters: 8.9 GB of f32 parameters, gradients and AdamW's state
    tiny   3 normal cells: it shows that the bench works, and no memory

The model is built on the meta device. Each rank has one thread, and --memory is its budget; the one process has one thread and twice that. The
first stage keeps more activations for backward, for two micro-batches at once, so the cut gives it fewer parameters. Memory is a process's
peak (VmHWM). Seconds are medians of all steps but the first. --json prints JSON, whose "run" is for docs/benchmarks/runs.json.

    .venv/bin/python bench/python/amoebanet_pipeline.py --steps 3
"""
import json
import os
import statistics
import subprocess
import sys
import time

from side_by_side import ROOT, parser_of, peak_bytes, run_entry, tell

sys.path.insert(0, str(ROOT / "bindings" / "python"))
STAGES, CLASSES = 2, 1000
CASES = {"557m": {"channels": 446, "cells": 6}, "tiny": {"channels": 16, "cells": 1}}
CUTS = {"557m": "0-35,36-45", "tiny": "0-11,12-15"}
# For each sum its two parts: the index of a value (0 and 1 are the outputs of the last cell but one and of the last cell, 2 is the first
# sum), and the operation on it.
NORMAL = (((0, "separable 7"), (1, "separable 3")), ((0, "separable 3"), (1, "same")), ((1, "average"), (0, "same")),
          ((1, "separable 7"), (0, "average")), ((1, "separable 3"), (2, "separable 3")))
REDUCTION = (((0, "separable 7"), (1, "separable 5")), ((1, "most"), (0, "separable 7")), ((1, "average"), (0, "separable 5")),
             ((2, "separable 3"), (1, "most")), ((2, "average"), (3, "same")))


def arguments():
    parser = parser_of(__doc__, batch=2, micro=4, side=64, steps=3, memory="6GiB")
    parser.add_argument("--case", choices=CASES, default="557m", help="by default 557m")
    return parser.parse_args()


# ---- the network ----


def network(channels, cells):
    """Returns the layers. A cell takes a pair, the outputs of the two cells before it, and is two layers, so that a cut may be within it."""
    import torch
    from torch import nn

    class Changed(nn.Sequential):
        """Changes the number of channels, and with a stride of 2 halves the sides."""

        def __init__(self, before, after, stride=1):
            super().__init__(nn.ReLU(), nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    class Separable(nn.Sequential):
        """Twice a depthwise convolution followed by one over all channels."""

        def __init__(self, width, size, stride):
            twice = [[nn.ReLU(), nn.Conv2d(width, width, size, each, size // 2, groups=width, bias=False), nn.Conv2d(width, width, 1, bias=False),
                      nn.BatchNorm2d(width)] for each in (stride, 1)]
            super().__init__(*twice[0], *twice[1])

    def unused(sums):
        sources = [source for parts in sums for source, _ in parts]
        return [number for number in range(2, 2 + len(sums)) if number not in sources]

    def made(what, width, stride):
        if what == "same":
            return nn.Identity() if stride == 1 else Changed(width, width, stride)
        if what == "average":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        return nn.MaxPool2d(3, stride, 1) if what == "most" else Separable(width, int(what.split()[1]), stride)

    class Stem(nn.Sequential):
        def __init__(self, width):
            super().__init__(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width))

        def forward(self, images):
            values = super().forward(images)
            return values, values

    class Entry(nn.Module):
        """The first half of a cell: computes the inputs of its sums from the output of the previous layer."""

        def __init__(self, before, last, width, is_larger):
            """before, last: the channels of the pair; is_larger: the former has twice the sides of the latter."""
            super().__init__()
            self.before, self.last = Changed(before, width, 2 if is_larger else 1), Changed(last, width)

        def forward(self, pair):
            return pair[1], [self.before(pair[0]), self.last(pair[1])]

    class Sums(nn.Module):
        """The second half of a cell."""

        def __init__(self, width, sums, stride):
            super().__init__()
            self.sources, self.joined = [[source for source, _ in parts] for parts in sums], unused(sums)
            self.parts = nn.ModuleList(nn.ModuleList(made(what, width, stride if source < 2 else 1) for source, what in parts) for parts in sums)

        def forward(self, given):
            last, values = given[0], list(given[1])
            for (first, second), (one, other) in zip(self.sources, self.parts, strict=True):
                values.append(one(values[first]) + other(values[second]))
            return last, torch.cat([values[number] for number in self.joined], 1)

    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.classes = nn.Linear(width, CLASSES)

        def forward(self, pair):
            return self.classes(torch.relu(pair[1]).mean((2, 3)))

    before = last = channels // 4
    layers, is_larger = [Stem(last)], False
    for width, group in ((channels // 2, ""), (channels, "n" * cells), (2 * channels, "n" * cells), (4 * channels, "n" * cells)):
        for kind in "r" + group:
            sums, stride = (NORMAL, 1) if kind == "n" else (REDUCTION, 2)
            layers += [Entry(before, last, width, is_larger), Sums(width, sums, stride)]
            before, last, is_larger = last, len(unused(sums)) * width, kind == "r"
    return nn.Sequential(*layers, Head(last))


# ---- a rank ----


def run_rank(a):
    import torch

    import sluice.torch

    torch.manual_seed(1)
    with torch.device("meta"):
        model = network(**CASES[a["case"]])
    parameters = sum(p.numel() for p in model.parameters())
    pipe = sluice.torch.Pipeline(model, sluice.AdamW(lr=1e-4), memory=a["memory"], micro_batches=a["micro"],
                                 stages=CUTS[a["case"]] if a["stages"] > 1 else None)
    seconds, losses = [], []
    for step in range(a["steps"]):
        drawn = torch.Generator().manual_seed(step)
        images = torch.randn(a["micro"] * a["batch"], 3, a["side"], a["side"], generator=drawn)
        classes = torch.randint(0, CLASSES, (len(images),), generator=drawn)
        begin = time.perf_counter()
        losses.append(pipe.train_step((images, classes), torch.nn.functional.cross_entropy, clip=1.0).item())
        seconds.append(time.perf_counter() - begin)
    own = sum(p.numel() for p in pipe.module.parameters())
    plan = sluice.torch.engine_of(pipe.module).plan()
    told = {"stage": pipe.stage, "parameters": parameters, "own": own, "seconds": seconds, "losses": losses, "peak": peak_bytes(),
            "predicted": plan["predicted_peak"]}
    pipe.close(values=False)
    sys.stdout.write(json.dumps(told) + "\n")  # in one write, since ranks share the output


# ---- both sides ----


def ran(a, stages):
    """Returns the reports of a run's ranks, by stage."""
    from sluice.model import size_of

    settings = {"case": a.case, "batch": a.batch, "micro": a.micro, "side": a.side, "steps": a.steps, "stages": stages,
                "memory": size_of(a.memory, "--memory") * STAGES // stages}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages), __file__, "--rank",
               json.dumps(settings)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda told: told["stage"])


def measure(a):
    whole, ranks = ran(a, 1)[0], ran(a, STAGES)
    seconds = {name: statistics.median(max(each) for each in zip(*(told["seconds"][1:] for told in side), strict=True))
               for name, side in (("one process", [whole]), ("stages", ranks))}
    result = {"case": a.case, "whole": whole, "stages": ranks, "seconds": seconds, "shares": [told["peak"] / whole["peak"] for told in ranks],
              "losses_equal": all(told["losses"] == whole["losses"] for told in ranks)}
    return result | {"run": run_of(a, result)}


def run_of(a, result):
    import torch

    whole, seconds = result["whole"], result["seconds"]
    rows = [[name, f"{told['own'] / 1e6:.1f}M", f"{told['peak'] / 2**20:.0f} MiB", f"{told['predicted'] / 2**20:.0f} MiB", f"{share:.3f}",
             f"{seconds['stages' if name != 'one process' else name]:.2f}"]
            for name, told, share in [("one process", whole, 1), *((f"stage {told['stage']} of {STAGES}", told, share)
                                                                   for told, share in zip(result["stages"], result["shares"], strict=True))]]
    note = (f"{whole['parameters'] / 1e6:.1f}M parameters in {3 * CASES[a.case]['cells']} normal and 4 reduction cells, f32, AdamW; {a.micro} micro-"
            f"batches of {a.batch} images of {a.side} x {a.side}; one thread a process; PyTorch {torch.__version__}. The losses of {a.steps} steps "
            f"are {', '.join(f'{loss:.6f}' for loss in whole['losses'])} in one process, and "
            f"{'the same bits' if result['losses_equal'] else 'OTHERS'} in {STAGES} stages.")
    columns = ["", "parameters", "most memory", "predicted", "of one process", "seconds a step"]
    return run_entry(__file__, [{"columns": columns, "rows": rows}], [note])


def show(result):
    print(result["run"]["notes"][0])
    for name, own, peak, predicted, share, seconds in result["run"]["tables"][0]["rows"]:
        print(f"{name}: {own} parameters, {peak} ({share} of one process; {predicted} predicted), {seconds} s a step")


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(json.loads(sys.argv[2]))
    a = arguments()
    result = measure(a)
    tell(a, result, show)
    return 0 if result["losses_equal"] else "stages have other losses than one process"


if __name__ == "__main__":
    sys.exit(main())
