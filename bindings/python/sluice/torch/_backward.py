"""Backward passes of a wrapped model, of which one may run within another."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType

import torch

from ..errors import StateError


BEGINNINGS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


def is_within_another() -> bool:
    """Whether the backward pass that calls this was begun by a function of another one. PyTorch does not tell, and runs both in
    one thread."""
    frame: FrameType | None = sys._getframe()
    passes = 0
    while frame is not None:
        passes += frame.f_code in BEGINNINGS
        frame = frame.f_back
    return passes > 1


class BackwardPasses(threading.local):
    """The backward passes of one thread. What runs within another one, as with torch.utils.checkpoint(use_reentrant=True), is
    a part of it. The numbers that PyTorch gives to passes ascend, and of a pass that fails it does not tell the end."""

    def __init__(self, began: Callable[[], None], ended: Callable[[], None], counted: bool) -> None:
        """began, ended: methods, whose object it does not keep alive. They are called when an outermost pass is noted first, and
        when one has ended that gave a gradient. counted: ended() must be called once for each, so that a pass is refused within
        one that was not noted."""
        self._began, self._ended, self._counted = weakref.WeakMethod(began), weakref.WeakMethod(ended), counted
        self._open: dict[int, bool] = {}  # by the pass: whether it gave a gradient

    def note(self) -> None:
        """Notes the pass that runs in this thread, or that there is none."""
        now: int = torch._C._current_graph_task_id()
        if now < 0:
            self._open.clear()  # those that are left have failed
        elif now not in self._open:
            if not is_within_another():
                self._open = {task: gave for task, gave in self._open.items() if task > now}  # earlier ones have failed
            if not self._open and (began := self._began()) is not None:
                began()
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
                "with accumulate=K, where each outermost backward() is a micro-batch; call zero_grad(), and do not call "
                "backward() in a function that autograd calls"
            )


def _end(passes: weakref.ref[BackwardPasses], ending: int) -> None:
    if (alive := passes()) is not None:
        alive.end(ending)
