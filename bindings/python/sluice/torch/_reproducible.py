"""What lets the results of wrapped models depend on the ranks, where they must not."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from ..errors import InvalidArgumentError


def check_reproducible(model: torch.nn.Module, accumulate: Any) -> None:
    """Raises InvalidArgumentError for a model that trains otherwise on each number of ranks."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidArgumentError(
            f"accumulate is {accumulate!r}, and reproducible=True is given; state how many micro-batches a step has over all ranks"
        )
    refuse_running_statistics(running_norms(model))


def running_norms(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The norms of a model that keep running statistics while they train, with their names."""
    return [
        (name, module) for name, module in model.named_modules() if isinstance(module, _NormBase) and module.track_running_stats
    ]


def refuse_running_statistics(norms: list[tuple[str, torch.nn.Module]]) -> None:
    """Raises InvalidArgumentError where one of these norms trains."""
    for name, module in norms:
        if module.training:
            raise InvalidArgumentError(
                f"'{name}' ({type(module).__name__}) keeps running statistics, which are of rank 0's micro-batches and would depend "
                "on how many ranks there are, and reproducible=True is given; make it with track_running_stats=False, use "
                "another norm, or freeze it by eval()"
            )


def computing() -> dict[str, str]:
    """By what PyTorch computes here, which all ranks must have alike for the same bits."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            models = {line.split(":", 1)[1].strip() for line in file if line.startswith(("model name", "CPU part"))}
    except OSError:
        models = set()
    return {
        "the CPU, with reproducible=True,": ", ".join(sorted(models)) or "unknown",
        "the instructions that PyTorch uses, with reproducible=True,": torch.backends.cpu.get_cpu_capability(),
        "torch.get_num_threads(), with reproducible=True,": str(torch.get_num_threads()),
        "torch.get_float32_matmul_precision(), with reproducible=True,": torch.get_float32_matmul_precision(),
        "PyTorch's build, with reproducible=True,": f"{torch.__version__} {torch.__config__.show()}",
    }
