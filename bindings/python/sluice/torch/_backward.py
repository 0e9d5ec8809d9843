"""The thread that uses a wrapped model, and its backward passes, of which one may run within another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from ..errors import StateError
from ._modes import outside_of_graphs

# By thread: of the backward passes that it has begun and that have not ended, each within the one before, whether each runs within another one.
_runs: dict[int, list[bool]] = {}
_run = torch.autograd.graph._engine_run_backward
on_failures: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose tell_of_pass() is called with the error of a backward pass for which PyTorch has no memory, and may raise another one."""


@outside_of_graphs
def _run_counted(*args: Any, **kwargs: Any) -> Any:
    """Runs a backward pass, in place of PyTorch's own function: a pass says neither who waits for it nor that it has failed."""
    me = threading.get_ident()
    mine = _runs.setdefault(me, [])
    mine.append(in_pass())
    try:
        return _run(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        for each in list(on_failures):
            each.tell_of_pass(error)
        raise
    finally:
        mine.pop()
        if not mine:
            del _runs[me]


def in_pass() -> bool:
    """Whether this is in a backward pass of PyTorch's."""
    return torch._C._current_graph_task_id() != -1


class _Pass(NamedTuple):
    """A backward pass that uses the model, as it was noted."""

    thread: int  # in which PyTorch runs it
    begun: int  # how many passes that thread has begun that have not ended; two: this one is within another, of which PyTorch says nothing
    is_own: bool  # whether that thread has begun it, and within no other one


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
        self.check: Callable[[], None] = lambda: None
        """Comes before each use, which it may refuse."""
        torch.autograd._engine_run_backward = _run_counted  # type: ignore[attr-defined]

    def watch(self, began: Callable[[], None], ended: Callable[[], None], counted: bool) -> None:
        """Lets these methods, whose object it does not keep alive, be called when an outermost pass begins to use the model, and when
        one has ended without an error that gave a gradient. counted: ended() must be called once for each, so that a pass is refused
        within one that was not noted."""
        self._began, self._ended, self._counted = weakref.WeakMethod(began), weakref.WeakMethod(ended), counted

    def __enter__(self) -> None:
        self.check()
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
        me = threading.get_ident()
        mine = _runs.get(me, [])
        made = _Pass(me, len(mine), mine == [False])
        with self._lock:
            waits = self._thread in (None, me) or (bool(_runs.get(self._thread or 0)) and not made.is_own)
            if not waits or any(made.is_own if other.thread != me else made.begun <= other.begun for other in self._passes.values()):
                _refuse()
            # PyTorch keeps it until the pass ends, in whichever way; a traceback would keep a variable of this function's for longer.
            torch.autograd.Variable._execution_engine.queue_callback(_End(self, number, ended))
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
        if self._passes[number].begun <= 1:
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
    """An object that autograd keeps until a backward pass ends, in whichever way. It calls `ended` then where there was no error."""

    def __init__(self, users: Users, number: int, ended: Callable[[], object] | None) -> None:
        self._users, self._number, self._ended, self._is_done, self._is_dropped = users, number, ended, False, False

    def __call__(self) -> None:
        self._is_done = True
        try:
            self._users._end_pass(self._number)
        except BaseException:
            self._drop()  # the traceback keeps this for as long as the user handles the error
            raise

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            self._users._drop_pass(self._number, self._is_done, self._ended)


def _refuse() -> NoReturn:
    raise StateError(
        "two threads use one wrapped model at the same time, in a call, a backward pass, a step, full_parameters() or a checkpoint: let "
        "them use it one after another (a lock around each step, say), or wrap a model for each"
    )
