"""Modes of PyTorch that see each operation of their thread, and say what torch.compile() does there meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import DynamoStance
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    any_torch_dispatch_mode_on_stack,
)


class Mode(TorchDispatchMode):
    """A mode of its thread under which functions are compiled, unless it says otherwise. PyTorch's own __enter__() also sets flags of the
    whole process, which stay set for ever where two threads enter and leave modes by turns; then compiled functions are compiled anew at
    each call."""

    supports_higher_order_operators = True

    stance: DynamoStance | None = None
    """What torch.compile() does while the mode is active, in its thread and in backward passes that begin there; None: what the user
    says."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise nothing is compiled while it is active, nothing that was compiled before is used, and what PyTorch is to compile
        then it never compiles."""
        return True

    def __enter__(self) -> Any:
        """Enters the mode. Not inside of a graph where it has a stance."""
        if self.stance is not None and type(eval_frame._stance) is not _Stance:
            _install()
        _push_mode(self)
        if not self.ignore_compile_internals():
            set_is_in_mode_without_ignore_compile_internals(True)
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode(getattr(self, "_mode_key", None))
        if not self.ignore_compile_internals():
            set_is_in_mode_without_ignore_compile_internals(any_torch_dispatch_mode_on_stack())


class _Stance(DynamoStance):
    """The process's stance of torch.compile(), which is the one that the thread's modes say, and else the user's. PyTorch reads it in
    the thread that is about to call a compiled function. A stance that the user sets later takes its place."""

    def __init__(self, users: DynamoStance) -> None:
        self._users = users

    def _now(self) -> DynamoStance:
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if isinstance(mode, Mode) and mode.stance is not None:
                return mode.stance
        return self._users

    @property
    def stance(self) -> str:  # type: ignore[override]
        return self._now().stance

    @property
    def skip_guard_eval_unsafe(self) -> bool:  # type: ignore[override]
        return self._now().skip_guard_eval_unsafe

    @property
    def backend(self) -> Any:  # type: ignore[override]
        return self._now().backend


def enter_below(mode: Mode) -> None:
    """Enters a mode below those that are active in this thread, each of which ends by itself."""
    _do_below(len(_get_current_dispatch_mode_stack()), mode.__enter__)


def leave_below(mode: Mode) -> None:
    """Ends a mode that may be below others in this thread."""
    stack = _get_current_dispatch_mode_stack()
    if mode in stack:
        _do_below(len(stack) - 1 - stack.index(mode), mode.__exit__)


def _do_below(count: int, act: Callable[[], object]) -> None:
    """Calls it while that many of the innermost modes of this thread are not active."""
    above: list[Any] = []
    try:
        while len(above) < count:
            above.append(_pop_mode())
        act()
    finally:  # also after a KeyboardInterrupt
        for other in reversed(above):
            _push_mode(other)


def _install() -> None:
    made = _Stance(eval_frame._stance)
    made._users = eval_frame._set_stance(made)  # another thread may have set one since
