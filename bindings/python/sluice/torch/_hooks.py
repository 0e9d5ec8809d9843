"""The hooks of saved tensors that are in force in a thread. PyTorch has a stack of them, and calls the innermost alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Ours:
    """Hooks of a wrapped model, of which `_pack` is the first."""

    ends_with_outer = True  # they end with the hooks below them at the latest

    def is_on(self, hooks: Hooks | None) -> bool:
        """Whether these hooks are its own."""
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def remove(self) -> None:
        """Ends its hooks in this thread, if they are in force, and those of ours above them that end with them. Others' stay."""
        _remove(self.is_on)


def innermost() -> Hooks | None:
    """This thread's innermost hooks."""
    top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


def refusal() -> str | None:
    """Why no hooks may come into force in this thread, if so."""
    why: str | None = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return why


def push(hooks: Hooks) -> None:
    """Brings hooks into force in this thread."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _pop() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def _remove(is_searched: Callable[[Hooks], bool]) -> bool:
    """Ends the innermost hooks that are searched, and those of ours above them that end with them. Returns whether there were any."""
    above = []
    while (hooks := innermost()) is not None and not is_searched(hooks):
        above.append(hooks)
        _pop()
    if hooks is not None:
        _pop()
    for other in reversed(above):
        owner = getattr(other[0], "__self__", None)
        if hooks is None or not (isinstance(owner, Ours) and owner.ends_with_outer):
            push(other)
    return hooks is not None
