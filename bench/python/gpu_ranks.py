#!/usr/bin/env python3
"""Trains a small Llama of transformers with two ranks, and with three, that share one GPU. The bits must be the same at stages 0 to 3,
wherever the model is placed, and whether ranks read each other's GPU memory or use host memory; the losses must be near those of as many
ranks on the CPU. The same holds for the two stages of a pipeline, also where they are threads of one process.

    python3 bench/python/gpu_ranks.py

The exit status is 4 where PyTorch sees no GPU, or there is no transformers. --fake runs a tiny model on the tests' fake driver, which
$SLUICE_CUDA_DRIVER names: this tests the script, and shows nothing about a GPU."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import gpu_vs_pytorch
import torch
from gpu_sides import find_packages
from gpu_transformers import CLIP, FAKE, NEAR, REAL, STEPS, Ways
from side_by_side import free_port

SIZES = {2: "two ranks", 3: "three ranks"}
CPU = "on the CPU"
# By stage, place, links of the ranks, and processor of updates. Ranks on one GPU do not measure it, so its rates are stated.
RUNS = [(0, "device", "gpus", None), (1, "memory", "host", None), (1, "disk", "gpus", None), (3, "device", "gpus", None),
        (2, "device", "gpus", None), (3, "memory", "host", None), (3, "memory", "gpus", "cpu")]
OF_STAGES = ["device", "memory"]


class Ranks(Ways):
    """A rank's part of each run."""

    def __init__(self, rank, size, chosen, fake, folder):
        share = {"device_memory": "400MiB" if fake else chosen["device_memory"], "rows": size * chosen["rows"]}
        super().__init__(chosen | share, fake, folder)
        self.rank, self.size, self.of_rank = rank, size, chosen["rows"]

    def batch(self, step):
        first = (self.size * step + self.rank) * self.of_rank
        return self.rows[first : first + self.of_rank].to(self.device)

    def on_shared_gpu(self):
        facts = self.sluice.DeviceFacts(2e10, 2e10, 3e10, 2e10, 2e10, 0 if self.fake else 600 << 20)
        return {"device": "cuda:0", "reserve": self.chosen["reserve"], "device_facts": facts}

    def losses_of(self, stage, place, links, updates):
        return self.losses(place, stage=stage, accumulate=self.size, links=links, updates=updates, **self.on_shared_gpu())

    def losses_of_stages(self, place, here=False):
        """The losses and norms of a pipeline, which has the ranks' batches as micro-batches. place None: on the CPU. here: this process has both
        stages."""
        given = {"memory": "16GiB", "reserve": "1GiB"} if place is None else self.options(place) | self.on_shared_gpu()
        if here:
            given |= {"device": None, "devices": ["cuda:0", "cuda:0"], "ranks": False}
        pipe = self.sluice.torch.Pipeline(self.made(), self.optimizer(), micro_batches=self.size, **given)
        seen = []
        for ids in self.rows.chunk(STEPS):
            seen.append(pipe.forward_backward({"input_ids": ids, "labels": ids}).item())
            seen.append(pipe.clip_grad_norm_(CLIP).item())
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
        pipe.close(values=False)
        return seen

    def losses_on_cpu(self):
        self.device, before = "cpu", self.device
        try:
            model, optimizer = self.sluice.torch.wrap(self.made(), self.optimizer(), memory="16GiB", accumulate=self.size, reserve="1GiB")
            seen = self.trained(model, optimizer)
            self.sluice.torch.close(model, values=False)
            return seen
        finally:
            self.device = before


def name_of(stage, place, links, updates):
    return f"stage {stage}, {place}, {links}" + ("" if updates is None else f", updates by the {updates.upper()}")


def rank(given):
    """Returns a rank's report: the losses and norms of each run, and those on the CPU, of ranks and of two stages."""
    find_packages(given)
    size = int(os.environ["WORLD_SIZE"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    ways = Ranks(int(os.environ["RANK"]), size, FAKE if given["fake"] else REAL, given["fake"], given["folder"])
    runs, places = (RUNS[:: 3 * (size - 1)], OF_STAGES[1:]) if given["fake"] else (RUNS, OF_STAGES)  # which is slow
    tries = {SIZES[size]: {CPU: ways.losses_on_cpu} | {name_of(*run): partial(ways.losses_of, *run) for run in runs}}
    if size == 2:
        of_stages = {CPU: partial(ways.losses_of_stages, None)} | {place: partial(ways.losses_of_stages, place) for place in places}
        tries["a pipeline of two"] = of_stages
        if ways.rank == 0:  # the other rank has left the GPU
            of_stages |= {f"{place}, in one process": partial(ways.losses_of_stages, place, here=True) for place in places}
    return {kind: {name: tried(f"{kind}, {name}", losses) for name, losses in of.items()} for kind, of in tries.items()}


def tried(name, losses):
    print(f"{name} ...", file=sys.stderr, flush=True)
    return losses()


def line_of(told):
    """Returns the line that describes all ranks' runs. Raises AssertionError where they differ."""
    return ", and ".join(line_of_kind(kind, [runs[kind] for runs in told]) for kind in told[0])


def line_of_kind(kind, told):
    for number, runs in enumerate(told):
        (_, expected), (first, bits), *others = runs.items()
        for name, found in others:
            if found != bits:
                raise AssertionError(f"rank {number} of {kind}: '{name}' gives {found}, and '{first}' {bits}")
        far = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(bits, expected, strict=True))
        if not far <= NEAR:
            raise AssertionError(f"rank {number} of {kind}: '{first}' gives {bits}, and it gives {expected} on the CPU")
    return f"{kind}: the same bits at {'; '.join(name for name in told[0] if name != CPU)}; {far:.1e} from the CPU"


def run(given, size, end):
    """Starts so many ranks, and returns their reports. end: when they must have ended. Raises AssertionError where one has failed, or has
    not ended."""
    begun, port, ranks = time.monotonic(), free_port(), []
    for number in range(size):
        variables = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                     "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        ranks.append(subprocess.Popen([sys.executable, __file__, "--rank", json.dumps(given)], env=os.environ | variables,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [each.communicate(timeout=max(1, end - time.monotonic())) for each in ranks]
    except subprocess.TimeoutExpired:
        for each in ranks:
            each.kill()
        printed = " ".join(ranks[0].communicate()[1].split())[-300:] or "nothing"
        raise AssertionError(f"{SIZES[size]} had not ended after {time.monotonic() - begun:.0f} s, when the time for all of them ended; "
                             f"rank 0 had printed: {printed}") from None
    finally:
        for each in ranks:
            each.kill()
    for number, (each, (_, errors)) in enumerate(zip(ranks, told, strict=True)):
        if each.returncode != 0:
            raise AssertionError(f"rank {number} ended with {each.returncode}: {' '.join(errors.split())[-400:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in told]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all ranks, by default 3600")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fake", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        print(json.dumps(rank(a.rank)), flush=True)
        os._exit(0)  # the shutdown of libraries takes time
    gpu_vs_pytorch.check_transformers(a.fake)
    begun = time.monotonic()
    with gpu_vs_pytorch.packages() as where, tempfile.TemporaryDirectory() as folder:
        try:
            lines = [line_of(run(where | {"fake": a.fake, "folder": folder}, size, begun + a.limit)) for size in SIZES]
            told = {"passed": True, "line": ", and ".join(lines)}
        except AssertionError as error:
            told = {"passed": False, "line": f"{type(error).__name__}: {error}"}
    told["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps({"ranks": told}) if a.json else told["line"], flush=True)
    return 0 if told["passed"] or a.json else 1


if __name__ == "__main__":
    sys.exit(main())
