"""What would let the bits of a wrapped model depend on how many ranks there are, where they must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._beside import saved_buffers
from ._modes import Hook, outside_of_graphs


def check_reproducible(model: torch.nn.Module, accumulate: Any) -> None:
    """Raises InvalidArgumentError for a model that trains otherwise on each number of ranks."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidArgumentError(
            f"accumulate is {accumulate!r}, and reproducible=True is given; state how many micro-batches a step has over all ranks"
        )
    for name, module in model.named_modules():
        _refuse_running_statistics(name, module)


def _refuse_running_statistics(name: str, module: torch.nn.Module) -> None:
    """Raises InvalidArgumentError where the module is a norm that keeps running statistics, and trains."""
    if module.training and getattr(module, "track_running_stats", False):
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
    found = {
        "the CPU": ", ".join(sorted(models)) or "unknown",
        "the instructions that PyTorch uses": torch.backends.cpu.get_cpu_capability(),
        "torch.get_num_threads()": str(torch.get_num_threads()),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "PyTorch's build": f"{torch.__version__} {torch.__config__.show()}",
    }
    return {f"{name}, with reproducible=True,": value for name, value in found.items()}


class _Watch:
    """The buffers of a module that are saved with it. What a call changes there depends on how many calls its rank has made,
    and often on their inputs. (What is not saved is kept from call to call, as positions are, and the ranks compare it.)"""

    def __init__(self, name: str, idle: Callable[[], bool]) -> None:
        self._name, self._idle = name, idle
        self._before: dict[str, tuple[torch.Tensor, int]] = {}

    def begin(self, module: torch.nn.Module, *_: Any) -> None:
        self._before = {}
        if module.training and not self._idle():
            _refuse_running_statistics(self._name, module)
            self._before = {name: (buffer, buffer._version) for name, buffer in saved_buffers(module, False).items()}

    def end(self, module: torch.nn.Module, *_: Any) -> None:
        before, self._before = self._before, {}
        now = saved_buffers(module, False) if before else {}
        for name, (buffer, version) in before.items():
            if now.get(name) is not buffer or buffer._version != version:
                raise InvalidArgumentError(
                    f"'{self._name}' ({type(module).__name__}) has changed its buffer '{name}' in a forward pass, so that it depends "
                    "on how many micro-batches a rank computes, and reproducible=True is given; use another module, freeze this one "
                    "by eval(), or change the buffer outside of forward passes, alike on all ranks. Where it only keeps what can be "
                    "computed again, register it with persistent=False"
                )


def watch(model: torch.nn.Module, idle: Callable[[], bool]) -> list[Any]:
    """Lets a call of a module raise InvalidArgumentError where it changes such buffers while it trains. idle: whether a call is
    only tried. Returns what removes the hooks."""
    hooks: list[Any] = []
    for name, module in model.named_modules():
        if saved_buffers(module, False):
            made = _Watch(name, idle)
            # Before all others, since some modules keep buffers in such a hook (torch.nn.utils.spectral_norm).
            hooks.append(module.register_forward_pre_hook(_not_compiled(made.begin), prepend=True))
            hooks.append(module.register_forward_hook(_not_compiled(made.end)))
    return hooks


def _not_compiled(hook: Hook) -> Hook:
    """The same hook, without which graphs of torch.compile() stay whole."""
    alone = outside_of_graphs(hook)

    def run(*given: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            alone(*given)

    return run
