"""Backward passes of a wrapped model, of which one may run within another."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import torch

from ..errors import StateError


class BackwardPasses(threading.local):
    """The backward passes of one thread. What runs within another one, as with torch.utils.checkpoint(use_reentrant=True), is
    a part of it. The numbers that PyTorch gives to passes ascend, and of a pass that fails it does not tell the end."""

    def __init__(self, ended: Callable[[], None], counted: bool) -> None:
        """ended: a method, whose object it does not keep alive. It is called at the end of each outermost pass that gave a
        gradient. counted: it must be called once for each, so that a pass is refused within one that was not noted."""
        self._ended, self._counted = weakref.WeakMethod(ended), counted
        self._open: dict[int, bool] = {}  # by the pass: whether it gave a gradient

    def note(self) -> None:
        """Notes the pass that runs in this thread, or that there is none."""
        now: int = torch._C._current_graph_task_id()
        if now < 0:
            self._open.clear()  # those that are left have failed
        elif now not in self._open:
            self._open[now] = False
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end, weakref.ref(self), now))

    def gave(self) -> None:
        """Notes that the pass that runs has given a parameter's gradient."""
        self.note()
        self._open[torch._C._current_graph_task_id()] = True

    def end(self, ending: int) -> None:
        """That pass has ended without an error."""
        if torch._C._current_autograd_node() is not None:  # the node of another pass, which has begun this one
            self._end_inner(ending)
            return
        gave = any(gave for task, gave in self._open.items() if task >= ending)
        self._open.clear()
        if gave and (ended := self._ended()) is not None:
            ended()

    def _end_inner(self, ending: int) -> None:
        if not self._open[ending]:
            del self._open[ending]
        elif self._counted and min(self._open) == ending:
            raise StateError(
                "a backward pass has given gradients within another one of which Sluice knew nothing, and the model was wrapped "
                "with reproducible=True, where each outermost backward() is a micro-batch; call zero_grad(), and do not call "
                "backward() in a function that autograd calls"
            )


def _end(passes: weakref.ref[BackwardPasses], ending: int) -> None:
    if (alive := passes()) is not None:
        alive.end(ending)
