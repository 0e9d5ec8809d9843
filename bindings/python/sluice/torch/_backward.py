"""Backward passes of a wrapped model, of which one may run within another, and the thread that uses it."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, NoReturn

import torch

from ..errors import StateError

_BEGINNINGS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_WAITS_FOR_PASS = torch.autograd.graph._engine_run_backward.__code__  # the function in which a thread waits for its backward pass


def _count_beginnings() -> int:
    """How many backward passes have begun in this thread and not ended. Two: one was begun by a function of the other, for which
    PyTorch runs both in one thread, and does not tell."""
    frame: FrameType | None = sys._getframe()
    passes = 0
    while frame is not None:
        passes += frame.f_code in _BEGINNINGS
        frame = frame.f_back
    return passes


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
            if _count_beginnings() <= 1:
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


# ---- the thread that uses a wrapped model ----


class _Pass(NamedTuple):
    """A backward pass that uses the model, as it was noted."""

    thread: int  # in which PyTorch runs it
    beginnings: int  # how many passes have begun in that thread and not ended


class Users:
    """Refuses a second thread that uses a wrapped model. A thread uses it inside of a `with`; a backward pass does from begin_pass()
    until it ends or fails. PyTorch runs passes of a GPU, and some on the CPU, in threads of its own: a pass belongs to the thread that
    waits for it. Calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # is inside of the `with`
        self._depth = 0
        self._passes: dict[int, _Pass] = {}  # by PyTorch's number

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            in_pass = torch._C._current_graph_task_id() != -1  # and so is what it calls
            if not in_pass and (self._passes or self._thread not in (None, me)):
                _refuse()
            self._depth += 1
            if self._thread is None:
                self._thread = me

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._thread = None

    def begin_pass(self, ended: Callable[[], object] = lambda: None) -> bool:
        """Comes in a backward pass, when it is about to use the model; returns whether this is in one. ended: comes once, when it has
        ended or failed."""
        number: int = torch._C._current_graph_task_id()
        if number == -1 or number in self._passes:
            return number != -1
        made = _Pass(threading.get_ident(), _count_beginnings())
        with self._lock:
            waits = self._thread in (None, made.thread) or _runs_now(self._thread) is _WAITS_FOR_PASS
            if not waits or any(_is_anothers(made, other) for other in self._passes.values()):
                _refuse()
            told = _Told()
            weakref.finalize(told, self._end_pass, number, ended).atexit = False
            torch.autograd.Variable._execution_engine.queue_callback(told)  # keeps it until the pass ends, in whichever way
            self._passes[number] = made
        return True

    def _end_pass(self, number: int, ended: Callable[[], object]) -> None:
        self._passes.pop(number, None)
        ended()


class _Told:
    """What a backward pass keeps until its end."""

    def __call__(self) -> None:
        """Does nothing: the pass then lets go of it."""


def _is_anothers(made: _Pass, other: _Pass) -> bool:
    """Whether a pass, which begins while another one goes on, is not within that one."""
    if made.thread == other.thread:
        return made.beginnings <= other.beginnings
    return made.beginnings == 1 and not isinstance(threading.current_thread(), threading._DummyThread)


def _runs_now(thread: int | None) -> object:
    """The innermost function of Python's that runs in a thread, if any does."""
    # The collector may run in the middle of it in CPython 3.11, and let other threads go on, whose frames are then no longer there.
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread or 0)
        return None if frame is None else frame.f_code
    finally:
        if collects:
            gc.enable()


def _refuse() -> NoReturn:
    raise StateError(
        "two threads use one wrapped model at the same time, in a call, a backward pass, a step, full_parameters() or a checkpoint: let "
        "them use it one after another (a lock around each step, say), or wrap a model for each"
    )
