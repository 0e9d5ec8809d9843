"""The hooks of saved tensors that are in force in a thread. PyTorch has a stack of them, and calls the innermost alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ._stances import outside_of_graphs

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Ours:
    """Hooks of a wrapped model, of which `_pack` is the first."""

    ends_with_outer = True  # they end with the hooks below them at the latest

    def is_on(self, hooks: Hooks | None) -> bool:
        """Whether these hooks are its own."""
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def rebase(self, ended: list[Hooks]) -> None:
        """Comes when these hooks end, which were below its own; its own stay, and are about to be brought into force again."""

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
    above: list[Hooks] = []
    ended: list[Hooks] = []
    try:
        while (hooks := innermost()) is not None and not is_searched(hooks):
            above.append(hooks)
            _pop()
        if hooks is not None:
            _pop()
            ended.append(hooks)
    finally:  # also after a KeyboardInterrupt
        for other in reversed(above):
            owner = getattr(other[0], "__self__", None)
            if ended and isinstance(owner, Ours):
                if owner.ends_with_outer:
                    ended.append(other)
                    continue
                owner.rebase(ended)
            push(other)
    return bool(ended)


# ---- hooks that come into force within a call ----

_lock = threading.Lock()
_listeners: tuple[weakref.WeakMethod[Callable[[], None]], ...] = ()
_enter, _exit = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__


def listen(entered: Callable[[], None]) -> None:
    """Lets a method, whose object this does not keep alive, be called in each thread after hooks of others have come into force
    there: the user's, or those of torch.utils.checkpoint. These end, from then on, also where hooks of ours are left above them, as
    after a KeyboardInterrupt: torch.utils.checkpoint ends its own before the call ends that they are in."""
    global _listeners
    with _lock:
        _listeners = (*(each for each in _listeners if each() is not None), weakref.WeakMethod(entered))
        saved_tensors_hooks.__enter__ = _entered  # type: ignore[method-assign]
        saved_tensors_hooks.__exit__ = _exited  # type: ignore[method-assign]


@outside_of_graphs
def _entered(hooks: saved_tensors_hooks) -> None:
    _enter(hooks)
    try:
        for each in _listeners:
            if (entered := each()) is not None:
                entered()
    except BaseException:  # as a KeyboardInterrupt
        _exited(hooks)
        raise


@outside_of_graphs
def _exited(hooks: saved_tensors_hooks, *error: Any) -> None:
    if not _remove(lambda each: each[0] == hooks.pack_hook):
        _exit(hooks, *error)
