"""The thread that uses a wrapped model, and its backward passes, of which one may run within another."""

from __future__ import annotations

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


def in_pass() -> bool:
    """Whether this is in a backward pass of PyTorch's."""
    return torch._C._current_graph_task_id() != -1


class _Pass(NamedTuple):
    """A backward pass that uses the model, as it was noted."""

    thread: int  # in which PyTorch runs it
    beginnings: int  # how many passes have begun in that thread and not ended


class Users:
    """Refuses a second thread that uses a wrapped model. A thread uses it inside of a `with`; a backward pass does from begin_pass()
    until it ends or fails. PyTorch runs passes of a GPU, and some on the CPU, in threads of its own: a pass belongs to the thread that
    waits for it. A pass that runs within another one, as with torch.utils.checkpoint(use_reentrant=True), is a part of it. Calls may
    come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # is inside of the `with`
        self._depth = 0
        self._passes: dict[int, _Pass] = {}  # by PyTorch's number; these ascend
        self._gave = False  # whether the pass that goes on has given a parameter's gradient
        self.failed = False  # whether a pass failed that had given one; who looks at it sets it back
        self._began: Callable[[], Callable[[], None] | None] = lambda: None
        self._ended: Callable[[], Callable[[], None] | None] = lambda: None
        self._counted = False

    def watch(self, began: Callable[[], None], ended: Callable[[], None], counted: bool) -> None:
        """Lets these methods, whose object it does not keep alive, be called when an outermost pass begins to use the model, and when
        one has ended without an error that gave a gradient. counted: ended() must be called once for each, so that a pass is refused
        within one that was not noted."""
        self._began, self._ended, self._counted = weakref.WeakMethod(began), weakref.WeakMethod(ended), counted

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if not in_pass() and (self._passes or self._thread not in (None, me)):  # what a pass calls is the pass's
                _refuse()
            self._depth += 1
            if self._thread is None:
                self._thread = me

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._thread = None

    def is_outermost(self) -> bool:
        """Whether the thread is inside of one `with`, and no pass has begun."""
        return self._depth == 1 and not self._passes and not in_pass()

    def begin_pass(self, ended: Callable[[], object] | None = None) -> bool:
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
            end = _End(self, number, ended)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # keeps it until the pass ends, in whichever way
            is_outermost = not self._passes
            self._passes[number] = made
        if is_outermost:
            self._gave = False
            if (began := self._began()) is not None:
                began()
        return True

    def note_gradient(self) -> None:
        """Notes that the pass that runs has given a parameter's gradient."""
        self._gave = self.begin_pass()

    def _end_pass(self, number: int) -> None:
        """That pass has ended without an error."""
        if not self._gave or min(self._passes) != number:
            return
        if self._passes[number].beginnings <= 1:
            if (ended := self._ended()) is not None:
                ended()
        elif self._counted:
            raise StateError(
                "a backward pass has given gradients within another one of which Sluice knew nothing, and the model was wrapped "
                "with accumulate=K, where each outermost backward() is a micro-batch; call zero_grad(), and do not call "
                "backward() in a function that autograd calls"
            )

    def _drop_pass(self, number: int, is_done: bool, ended: Callable[[], object] | None) -> None:
        self._passes.pop(number, None)
        self.failed = self.failed or (self._gave and not is_done)
        if ended is not None:
            ended()


class _End:
    """What a backward pass keeps until its end, in whichever way, and calls where there was no error."""

    def __init__(self, users: Users, number: int, ended: Callable[[], object] | None) -> None:
        self._users, self._number, self._ended, self._is_done = users, number, ended, False

    def __call__(self) -> None:
        self._is_done = True
        self._users._end_pass(self._number)

    def __del__(self) -> None:
        self._users._drop_pass(self._number, self._is_done, self._ended)


def _count_beginnings() -> int:
    """How many backward passes have begun in this thread and not ended. Two: one was begun by a function of the other, for which
    PyTorch runs both in one thread, and does not tell."""
    frame: FrameType | None = sys._getframe()
    passes = 0
    while frame is not None:
        passes += frame.f_code in _BEGINNINGS
        frame = frame.f_back
    return passes


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
