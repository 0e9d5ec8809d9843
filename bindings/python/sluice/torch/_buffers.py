"""Buffers that a model changes while it trains, which let bits depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._modes import Hook, outside_of_graphs


class _Watch:
    """The buffers of a module that are saved with it. What a call changes there depends on how many calls its rank has made,
    and often on their inputs. (What is not saved is kept from call to call, as positions are, and the ranks compare it.)"""

    def __init__(self, name: str, idle: Callable[[], bool]) -> None:
        self._name, self._idle = name, idle
        self._before: dict[str, tuple[torch.Tensor, int]] = {}

    def begin(self, module: torch.nn.Module, *_: Any) -> None:
        self._before = {} if self._idle() or not module.training else saved_buffers(module)

    def end(self, module: torch.nn.Module, *_: Any) -> None:
        before, self._before = self._before, {}
        now = saved_buffers(module) if before else {}
        for name, (buffer, version) in before.items():
            if name not in now or now[name][0] is not buffer or now[name][1] != version:
                raise InvalidArgumentError(
                    f"'{self._name}' ({type(module).__name__}) has changed its buffer '{name}' in a forward pass, so that it depends "
                    "on how many micro-batches a rank computes, and reproducible=True is given; use another module, freeze this one "
                    "by eval(), or change the buffer outside of forward passes, alike on all ranks. Where it only keeps what can be "
                    "computed again, register it with persistent=False"
                )


def saved_buffers(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """A module's own buffers that its state_dict() has, with their versions."""
    return {
        name: (buffer, buffer._version)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def watch(model: torch.nn.Module, idle: Callable[[], bool]) -> list[Any]:
    """Lets a call of a module raise InvalidArgumentError where it changes such buffers while it trains. idle: whether a call is
    only tried. Returns what removes the hooks."""
    hooks: list[Any] = []
    for name, module in model.named_modules():
        if saved_buffers(module):
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
