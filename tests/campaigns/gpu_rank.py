"""A rank of a run of gpu_rank_campaign.py: resumes a wrapped model from the newest checkpoint in a folder, saves after each step, and
prints a line of JSON for each step.

    gpu_rank.py FOLDER STEPS OPTIONS    OPTIONS is JSON: "gpu", with the driver's schedule and seed, or null; the rest is wrap()'s"""
import contextlib
import json
import pathlib
import sys

from support import fake_gpu, over_ranks

import sluice.torch


def tell(*what):
    print(json.dumps(what), flush=True)


def train(folder, steps, place, gpu, **options):
    on_gpu = over_ranks.ON_GPU | {"facts": gpu["has_peers"]} if gpu else {}
    model, optimizer = over_ranks._wrapped("wide", place, accumulate=over_ranks.SIZE, **options, **on_gpu)
    engine = sluice.torch.engine_of(model)
    if any(pathlib.Path(folder).glob("step-*")):
        engine.load(folder)
    tell("ready")
    if engine.steps == steps:
        engine.save(folder, keep=2)  # which removes what a save that was killed has left
    for step in range(engine.steps, steps):
        losses, norms = over_ranks._loop(model, optimizer, "wide", 1, over_ranks.SIZE, clip=1.0, first=step)
        tell(step, losses, norms)
        engine.save(folder, keep=2)
    tell("ended", over_ranks._digest(model))
    engine.options.others.barrier("the end of the run")  # until then others read shards of this rank
    sluice.torch.close(model, values=False)


def main():
    folder, steps, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    gpu = options["gpu"]
    with fake_gpu.shared(devices=over_ranks.SIZE, **gpu) if gpu else contextlib.nullcontext():
        train(folder, steps, **options)


if __name__ == "__main__":
    main()
