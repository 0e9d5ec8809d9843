"""The C handle of an Engine, protected against use after close, in callbacks and in forked processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from . import _abi
from ._library import library
from .errors import Error, StateError, error_of


# Functions in which a rank waits for the others.
_WAIT_FOR_RANKS = frozenset((
    "sluice_engine_create", "sluice_engine_step", "sluice_engine_save_with_files", "sluice_message_wait", "sluice_ranks_exchange",
    "sluice_ranks_broadcast", "sluice_ranks_barrier",
))  # fmt: skip


class _OfThread(threading.local):
    """The values that each thread has for itself."""

    waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Makes the `with` in which it waits for other ranks, or for its GPU: those may be threads of this process, one of which computes at a
    time."""


of_thread = _OfThread()


def call(function: str, *arguments: Any) -> None:
    """Calls a function of the library that returns a status; raises the status's exception."""
    loaded = library()
    if function in _WAIT_FOR_RANKS:
        with of_thread.waiting():
            status = getattr(loaded, function)(*arguments)
    else:
        status = getattr(loaded, function)(*arguments)
    if status != _abi.OK:
        raise error_of(status, loaded.sluice_last_error().decode("utf-8", "replace"))


def text_of(function: str, *arguments: Any) -> str:
    """Calls a function that returns a text through its last argument. Returns the text, or "" where there is none."""
    text = ctypes.c_void_p()
    call(function, *arguments, ctypes.byref(text))
    try:
        return (ctypes.string_at(text.value) if text.value else b"").decode("utf-8", "surrogateescape")
    finally:
        library().sluice_text_destroy(text)


@contextlib.contextmanager
def handlers_later() -> Iterator[Callable[[], None]]:
    """A `with` in which handlers of signals run only when the function that it gives is called, and at its end. Python runs them where one
    of its functions begins; in one that the library calls nothing catches what they raise, ctypes drops it, and the library goes on."""
    handlers: dict[int, Callable[[int, Any], Any]] = {}
    came: list[tuple[int, Any]] = []

    def later(number: int, frame: Any) -> None:
        came.append((number, frame))

    def run() -> None:
        try:
            while came:
                number, frame = came.pop(0)
                handlers[number](number, frame)
        finally:
            if came:
                run()

    try:
        if threading.current_thread() is threading.main_thread():  # no other one runs handlers
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, later)
        yield run
    finally:
        for of, handler in handlers.items():
            if signal.getsignal(of) is later:
                signal.signal(of, handler)
        run()


@contextlib.contextmanager
def called_back(run: Callable[..., object]) -> Iterator[Callable[..., int]]:
    """A `with` for a call of the library that calls `run`: gives the function that stands for it, which returns 1 where `run` or a handler
    of a signal raises. That is raised at the end, in place of the call's error."""
    raised: list[BaseException] = []
    with handlers_later() as run_handlers:

        def guarded(*arguments: Any) -> int:
            try:
                run_handlers()
                if not raised:
                    run(*arguments)
            except BaseException as error:  # also a KeyboardInterrupt: the caller of the engine raises it
                raised.append(error)
            return 1 if raised else 0

        try:
            yield guarded
        except Error:
            if not raised:
                raise
        if raised:
            raise raised.pop() from None


@contextlib.contextmanager
def interruptible(options: _abi.EngineOptions) -> Iterator[None]:
    """A `with` in which a call with these options, which plans or makes an engine, runs the handlers of signals. What one raises stops the
    call, and is raised."""
    with called_back(lambda _: None) as look:
        options.stop = _abi.STOP(look)
        yield


class Handle:
    """A sluice_engine, which is destroyed once, when no thread is inside a call on it."""

    def __init__(self, address: int, ended: Sequence[Callable[[], None]] = ()) -> None:
        """ended: functions that are called after the engine was destroyed."""
        self._address, self._ended = address, ended
        self._process = os.getpid()
        self._lock = threading.RLock()  # a finalizer may run while the lock is held
        self._changed = threading.Condition(self._lock)
        self._users: dict[object, int] = {}  # calls, and the threads that are inside of them
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child, and the engine belongs to its parent."""
        return self._process != os.getpid()

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Gives the engine's address, valid inside the `with`."""
        call = object()
        try:
            yield self._begin(call)
        finally:
            self._users.pop(call, None)  # comes first, since a second KeyboardInterrupt may follow
            self._tell_close()

    def call(self, function: str, *arguments: Any) -> None:
        begun = object()
        try:
            call(function, self._begin(begun), *arguments)
        finally:
            self._users.pop(begun, None)
            self._tell_close()

    def ask(self, question: str, *of: int | None, kind: Any = ctypes.c_uint32) -> Any:
        """Returns a number of this type, which the function of the library gives."""
        answer = kind()
        self.call(question, *of, ctypes.byref(answer))
        return answer.value

    def text(self, function: str, *arguments: Any) -> str:
        """Returns a text that the function of the library gives."""
        with self.use() as address:
            return text_of(function, address, *arguments)

    def call_back(self, function: str, unit: int, kind: Any, run: Callable[..., None]) -> None:
        """Calls a function of the library that calls `run` for a unit. Raises what `run` raises."""
        with called_back(run) as guarded:
            self.call(function, unit, kind(guarded), None)

    def _begin(self, call: object) -> int:
        if self._process != os.getpid():
            self.check()
        me = threading.get_ident()
        with self._lock:  # and not the condition, whose functions are Python's
            if self._closed:
                raise StateError("the engine was closed; make another")
            if me in self._users.values():
                raise StateError(
                    "the engine is used from a function that it calls itself, and would wait for that forever; "
                    "do this before or after"
                )
            self._users[call] = me
        return self._address

    def _tell_close(self) -> None:
        if self._closed:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """Destroys the engine after the calls of other threads have returned; does nothing if it is destroyed
        already."""
        if self.inherited:
            return  # the engine and its threads are the parent's
        with self._changed:
            if threading.get_ident() in self._users.values():
                raise StateError("the engine is closed from a function that it calls itself; do it after the call")
            self._closed = True
            self._changed.wait_for(lambda: not self._users)
            address, self._address = self._address, 0
        library().sluice_engine_destroy(address or None)
        for tell in self._ended if address else ():
            tell()

    def check(self) -> None:
        """Raises StateError in a process that was forked from the engine's process."""
        if self.inherited:
            raise StateError(
                f"the engine was made in process {self._process} and is used in {os.getpid()}, which was forked "
                "from it; use it where it was made"
            )
