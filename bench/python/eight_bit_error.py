"""Measures the distance between the results of 100 steps of AdamW with narrow state and with f32 state, beside other
8-bit optimizers.

    python bench/python/eight_bit_error.py [--elements N]        # with bitsandbytes and torchao where they are installed

The gradients pull towards a target, with noise, and differ in magnitude between groups of 64 elements. It prints the distances
from the result of torch.optim.AdamW, as shares of the mean distance that it moved: their mean, and their 99.9th percentile.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python"))
import sluice

STEPS = 100
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}


class Problem:
    def __init__(self, elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.start = torch.randn(elements, generator=generator) * 0.02
        self.target = torch.randn(elements, generator=generator)
        powers = torch.randn(elements // 64, generator=generator) * 0.7
        self.magnitude = 10 ** powers.repeat_interleave(64)

    def gradient(self, values: torch.Tensor, step: int) -> torch.Tensor:
        noise = torch.randn(len(values), generator=torch.Generator().manual_seed(step))
        return ((values - self.target) * 0.01 + noise * 0.1) * self.magnitude


def trained(problem: Problem, make: Callable[..., torch.optim.Optimizer]) -> torch.Tensor:
    values = torch.nn.Parameter(problem.start.clone())
    optimizer = make([values], **SETTINGS)
    for step in range(1, STEPS + 1):
        values.grad = problem.gradient(values.detach(), step)
        optimizer.step()
    return values.detach()


def trained_by_sluice(problem: Problem, state: str) -> torch.Tensor:
    units = [sluice.Unit("u", [sluice.Parameter("p", (len(problem.start),))])]
    options = sluice.Options(memory="2GiB", optimizer=sluice.AdamW(**SETTINGS), state=state)
    with sluice.Engine(units, options) as engine:
        engine.set_values("u", {"p": problem.start.numpy()})
        for step in range(1, STEPS + 1):
            engine.begin_step()
            with engine.acquire("u", gradient=True):
                values = torch.tensor(np.asarray(engine.parameter("p")))
                engine.add_gradient("p", problem.gradient(values, step).numpy())
            engine.step()
        return torch.tensor(np.asarray(engine.get_values("u")["p"]))


def peers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    found: dict[str, Callable[..., torch.optim.Optimizer]] = {}
    try:
        import bitsandbytes

        found["bitsandbytes"] = bitsandbytes.optim.AdamW8bit
    except ImportError:
        print("skipped: bitsandbytes, which is not installed")
    try:
        import torchao.optim

        found["torchao"] = torchao.optim.AdamW8bit
    except ImportError:
        print("skipped: torchao, which is not installed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 18)
    problem = Problem(parser.parse_args().elements)
    expected = trained(problem, torch.optim.AdamW)
    moved = (expected - problem.start).abs().mean()

    def show(name: str, found: torch.Tensor) -> None:
        off = (found - expected).abs() / moved
        print(f"{name:14} mean {off.mean():8.3%}   99.9th percentile {off.quantile(0.999):8.1%}", flush=True)

    for state in ("f32", "bf16", "8bit"):
        show(f"sluice {state}", trained_by_sluice(problem, state))
    for name, make in peers().items():
        show(name, trained(problem, make))


if __name__ == "__main__":
    main()
