"""Turns of the threads that use one model which is wrapped on a GPU."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType

import torch

from ..errors import StateError

_LOOKS_EVERY = 0.02  # seconds after which a thread that waits looks again at who has the turn
_PACKAGE = __name__.rpartition(".")[0]
# Of generators and the like, which may be suspended within a `with`: that they do not run does not tell that it has ended.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WAITS_FOR_PASS = torch.autograd.graph._engine_run_backward.__code__  # in which a thread waits for its backward pass

_waiting: dict[int, _Wait] = {}  # by thread
_tops_lock = threading.Lock()


class NoTurns:
    """Stands in for turns where the CPU computes, which serves touches: no thread waits."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def is_mine(self) -> bool:
        """Whether this thread has a turn: there are none."""
        return False

    def begin(self) -> int:
        """Does nothing."""
        return 0

    def end(self, begun: int) -> None:
        """Does nothing."""

    def is_on(self, begun: int) -> bool:
        """Whether that can be going on."""
        return True

    def begin_pass(self) -> None:
        """Does nothing."""


class _Life:
    """Ends with its thread. Before CPython 3.12 threading.enumerate() has threads that Python has not started for ever."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.life = _Life()


_here = _Here()


@dataclasses.dataclass(eq=False)
class _Wait:
    """A thread waits for its turn."""

    turns: Turns
    thread: int
    life: weakref.ref[_Life]
    number: int  # of the backward pass in which it waits, or -1
    runs_pass: bool  # it runs that one for another thread


@dataclasses.dataclass(eq=False)
class _Holder:
    """A thread that has the turn, and what for."""

    thread: int
    life: weakref.ref[_Life]
    begun: dict[int, FrameType | None] = dataclasses.field(default_factory=dict)  # each has ended when its frame has; None: unknown
    passes: set[int] = dataclasses.field(default_factory=set)  # the numbers of backward passes

    def lasts_beyond(self, wait: _Wait) -> bool:
        """Whether this thread's turn ends after its wait, and not before: as that of a pass may, unless it waits in one."""
        return any(_runs(frame) for frame in list(self.begun.values())) or (bool(self.passes) and wait.number != -1)


class Turns(NoTurns):
    """Lets one thread at a time use a wrapped model: between the hook that brings a unit in and the operation that uses it, no
    other thread may take the unit's room. A thread has the turn inside of a `with`, from begin() to end(), and from
    begin_pass() until that backward pass ends or fails; also for several of these, within one another. Other threads get it in
    the order in which they have come. Calls may come from any thread.

    On a GPU PyTorch runs backward passes in a thread of its own. It must not wait for a thread that itself waits for a backward pass,
    also through turns of other models, so it goes before that one, and has the turn until its passes have ended. Where a
    KeyboardInterrupt ends a module's call PyTorch runs no hook, so who waits looks whether the function still runs in which a call has
    begun.

    What PyTorch does of a pass outside of Python is not seen. So a pass that uses the model on its GPU and then on the CPU or on another
    GPU is an error. That a call goes on whose own pass has ended is not seen either: while another thread's pass that has gone before
    it goes on, that may take units which the call uses until its next module begins."""

    def __init__(self, freed: Callable[[], None] | None = None) -> None:
        """freed: a method, whose object it does not keep alive. It comes when what had the turn ends, before another thread gets it."""
        self._freed = None if freed is None else weakref.WeakMethod(freed)
        self._lock = threading.RLock()  # guards what follows, and is held for moments only
        self._changed = threading.Condition(self._lock)
        self._holders: list[_Holder] = []  # the last one has the turn, and those before it wait until it ends
        self._queue: list[_Wait] = []  # in the order in which they have come
        self._numbers = itertools.count()

    def __enter__(self) -> None:
        frame = sys._getframe(1)
        self._begin(None if frame.f_code.co_flags & _SUSPENDS else frame)

    def __exit__(self, *_: object) -> None:
        frame = sys._getframe(1)
        begun = None if frame.f_code.co_flags & _SUSPENDS else frame
        with self._lock:
            if (holder := self._mine()) is not None:
                for number in reversed(holder.begun):
                    if holder.begun[number] is begun:
                        self._end(holder, number)
                        return

    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        holders = self._holders
        return bool(holders) and holders[-1].life() is _here.life

    def begin(self) -> int:
        """Begins a call that comes from outside of this package. Returns what end() gets."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((f"{_PACKAGE}.", "torch._dynamo")):
            frame = frame.f_back
        return self._begin(None if frame.f_code.co_flags & _SUSPENDS else frame)

    def end(self, begun: int) -> None:
        """Ends what begin() has begun in this thread."""
        with self._lock:
            if (holder := self._mine()) is not None:
                self._end(holder, begun)

    def is_on(self, begun: int) -> bool:
        """Whether this thread is in the call that begin() has begun."""
        with self._lock:
            holder = self._mine()
            return holder is not None and begun in holder.begun and _runs(holder.begun[begun])

    def begin_pass(self) -> None:
        """Comes in a backward pass, which has the turn from then on. Elsewhere it does nothing."""
        number: int = torch._C._current_graph_task_id()
        if number == -1:
            return
        for holder in self._holders:
            if number in holder.passes:
                return
        told = _Told(self, number)
        weakref.finalize(told, self._end_pass, number).atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(told)  # keeps it until the pass ends, in whichever way
        with self._lock:
            self._take().passes.add(number)

    def end_alone(self, number: int) -> None:
        """That pass is about to end. Where nothing else has the turn, that ends for the user with the pass, whose thread may keep it for
        another moment."""
        with self._lock:
            if [(holder.begun, holder.passes) for holder in self._holders] == [({}, {number})]:
                self._free()

    def _end_pass(self, number: int) -> None:
        """That pass has ended. Comes in any thread."""
        with self._lock:
            for holder in self._holders:
                holder.passes.discard(number)
            self._pass_on()

    def _mine(self) -> _Holder | None:
        """This thread's latest holder, which has the turn or had it before others."""
        return next((holder for holder in reversed(self._holders) if holder.life() is _here.life), None)

    # ---- what follows, but for _begin(), comes with the lock held ----

    def _begin(self, frame: FrameType | None) -> int:
        number = next(self._numbers)
        with self._lock:
            self._take().begun[number] = frame
        return number

    def _take(self) -> _Holder:
        """Waits until this thread has the turn. Raises StateError where that would never be."""
        if not self.is_mine() and (self._holders or self._queue):
            self._wait()
        if not self.is_mine():
            self._holders.append(_Holder(threading.get_ident(), weakref.ref(_here.life)))
        return self._holders[-1]

    def _end(self, holder: _Holder, number: int) -> None:
        holder.begun.pop(number, None)
        if not (holder.begun or holder.passes):
            self._pass_on()

    def _pass_on(self) -> None:
        """Ends holders for which nothing is left."""
        self._holders = [holder for holder in self._holders if holder.begun or holder.passes]
        if not self._holders:
            self._free()
        self._changed.notify_all()

    def _free(self) -> None:
        if self._freed is not None and (freed := self._freed()) is not None:
            freed()

    def _wait(self) -> None:
        number: int = torch._C._current_graph_task_id()
        wait = _Wait(self, threading.get_ident(), weakref.ref(_here.life), number, number != -1 and not _is_pythons(threading.get_ident()))
        self._queue.append(wait)
        _waiting[wait.thread] = wait
        circle: list[_Wait | _Holder] = []
        try:
            while not self._may_go_on(wait):
                # Each link of a circle is seen at another moment. Those that are seen twice were all there in between.
                before, circle = circle, _circle(wait)
                if circle and circle == before:
                    _refuse(circle, wait)
                self._changed.wait(_LOOKS_EVERY)
        finally:
            self._queue.remove(wait)
            _waiting.pop(wait.thread, None)

    def _may_go_on(self, wait: _Wait) -> bool:
        self._drop_gone()
        if not self._holders:
            return self._queue[0] is wait
        last = self._holders[-1]
        if wait.number in last.passes and not (self.is_mine() or _is_pythons(last.thread)):
            _refuse_parts()
        return self.is_mine() or (wait.runs_pass and _waits_for_pass(last.thread, wait.thread))

    def _drop_gone(self) -> None:
        """Ends holders of which nothing goes on any more, and forgets threads that have ended."""
        self._queue = [wait for wait in self._queue if wait.life() is not None]
        while self._holders:
            holder = self._holders[-1]
            for number, frame in list(holder.begun.items()):
                if not _runs(frame) or (frame is None and holder.life() is None):
                    del holder.begun[number]
            if holder.begun or holder.passes:
                return
            self._holders.pop()


def _waits_for_pass(thread: int, me: int) -> bool:
    """Whether this thread waits for a backward pass, or for `me`, which runs one: by itself, or for turns of threads that do."""
    seen: set[int] = set()
    while thread != me and thread not in seen:
        if (wait := _waiting.get(thread)) is None:
            return _runs_now(thread) is _WAITS_FOR_PASS
        seen.add(thread)
        for holder in wait.turns._holders[-1:]:
            thread = holder.thread
    return thread == me


def _circle(wait: _Wait) -> list[_Wait | _Holder]:
    """The threads that wait for each other, this one first, with what they wait for. Empty where one of them goes on by itself, or may."""
    found: list[_Wait | _Holder] = []
    at: _Wait | None = wait
    while at is not None and at not in found and not at.runs_pass:
        holder = next(iter(at.turns._holders[-1:]), None)
        after = None if holder is None else _waiting.get(holder.thread)
        if holder is None or after is None or not holder.lasts_beyond(after):
            break
        found += [at, holder]
        if after is wait:
            return found
        at = after
    return []


def _refuse(circle: list[_Wait | _Holder], wait: _Wait) -> None:
    """Raises StateError in one of the threads."""
    threads = [each.thread for each in circle if isinstance(each, _Wait)]
    if wait.thread == max(threads):
        raise StateError(
            f"{len(threads)} threads wait for each other: each is in a call or in a backward pass of a wrapped model, which another "
            "one needs to go on with its own. On a GPU one thread at a time uses a wrapped model: let all threads use several "
            "models in the same order, or one after another"
        )


def _refuse_parts() -> None:
    """Raises StateError for a part of a backward pass, since what its GPU's part computes with is not seen. The other way round the
    thread that has begun the pass needs no more of a GPU's parameters when it runs nothing of Python's."""
    raise StateError(
        "a backward pass uses the model in two threads, in what it computes on the model's GPU and then on the CPU or on another GPU, and "
        "one of them could take away what the other one computes with; compute on the model's GPU all that uses its parameters, and "
        "all that is in one checkpoint with it"
    )


def _is_pythons(thread: int) -> bool:
    """Whether Python has started the thread. The threads in which PyTorch runs passes for others it has not."""
    return any(each.ident == thread and not isinstance(each, threading._DummyThread) for each in threading.enumerate())


class _Told:
    """What a backward pass keeps until it ends, and calls where it does not fail."""

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns, self._number = turns, number

    def __call__(self) -> None:
        self._turns.end_alone(self._number)


def _runs(frame: FrameType | None) -> bool:
    """Whether a function still runs. One that does not gives up what it still has of tensors."""
    try:
        if frame is not None:
            frame.clear()
    except RuntimeError:  # it runs
        return True
    return frame is None


def _runs_now(thread: int) -> CodeType | None:
    """The innermost function of Python's that runs in a thread, if any does."""
    # The collector may run in the middle of it in CPython 3.11, and let other threads go on, whose frames are then no longer there.
    with _tops_lock:
        collects = gc.isenabled()
        try:
            gc.disable()
            frame = sys._current_frames().get(thread)
            return None if frame is None else frame.f_code
        finally:
            if collects:
                gc.enable()
