"""Ranks: processes that train one model together."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Optional, Protocol, TypeVar

from . import _abi
from ._handle import call, text_of
from ._library import library
from .errors import CorruptError, Error, InvalidArgumentError, StateError

T = TypeVar("T")
R = TypeVar("R", bound="Ranks")

MOST_EXCHANGED = 65536
"""The most bytes that a rank may give to Ranks.exchange()."""


class Links(Protocol):
    """The transport of packets between ranks that share no memory: short arrays of bytes, which arrive unchanged, once, and in
    order between each two ranks. One thread of the engine calls all functions but wake(), which any thread may call. No
    function may call Sluice, or wait for a thread that waits for Sluice. An exception ends the work of all ranks."""

    rank: int
    size: int
    packet_bytes: int

    def send(self, to: int, packet: bytes) -> bool:
        """Sends a packet. Returns False where there is no room at present."""

    def receive(self, source: int) -> Optional[memoryview]:
        """Returns the next packet from that rank, as writable memory; None where there is none. Does not wait."""

    def wait(self, seconds: float) -> None:
        """Waits until a packet may have arrived or room may have become free, wake() was called since the last wait, or
        the time has passed."""

    def wake(self) -> None:
        """Ends the wait, or the next one."""

    def gone(self, rank: int) -> Optional[tuple[bool, str]]:
        """Returns None where the rank may be alive; else whether it left in order, and how, as in "its process has
        ended"."""

    def close(self) -> None:
        """Tells the others that this rank leaves in order. Packets that were sent still arrive."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that a rank has sent and received: of gradients, parameters, state and broadcasts; and of everything else; and those
    of the received bytes that ranks of other hosts sent."""

    sent: int
    received: int
    sent_besides: int
    received_besides: int
    received_from_hosts: int


def shared_memory(ranks: int) -> int:
    """Makes the shared memory through which so many ranks of this machine exchange bytes. Returns a descriptor, which the
    caller closes once all ranks have joined by it. Other processes open /proc/PID/fd/DESCRIPTOR for reading and
    writing."""
    descriptor = ctypes.c_int()
    call("sluice_ranks_memory", ranks, ctypes.byref(descriptor))
    return descriptor.value


class _RanksHandle:
    """A sluice_ranks, which is destroyed once, when it was closed and no engine uses it."""

    def __init__(self, address: int, keeps: Any, ended: Callable[[], None]) -> None:
        """keeps: an object that must live as long as the handle; ended: is called after it was destroyed."""
        self.address, self._keeps, self._ended = address, keeps, ended
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._engines, self._closed = 0, False

    @property
    def usable(self) -> bool:
        return not self._closed and self._process == os.getpid()

    def taken(self) -> None:
        with self._lock:
            self._engines += 1

    def given_back(self) -> None:
        with self._lock:
            self._engines -= 1
        self._end()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._end()

    def _end(self) -> None:
        if self._process != os.getpid():
            return  # its threads are the parent's
        with self._lock:
            if not self._closed or self._engines:
                return
            address, self.address = self.address, 0
        library().sluice_ranks_destroy(address or None)
        if address:
            self._ended()


class Message:
    """A message in flight. It is awaited once, also after an error."""

    def __init__(self, ranks: Ranks, address: int) -> None:
        self._ranks, self._address = ranks, address  # it needs the ranks until then

    def wait(self) -> None:
        """Waits until its bytes are received, or sent. Raises the error of the rank that failed first."""
        address, self._address = self._address, 0
        call("sluice_message_wait", address)


class Ranks:
    """This process's place among the ranks that train a model together: Options.ranks, of one engine. close() leaves the ranks; the
    engine must be closed before. exchange(), broadcast() and barrier() are collective: all ranks call them in the same order, from one
    thread at a time, and wait for each other there. Two ranks that wait for each other in different ones fail after 5 seconds. A rank that fails ends the work of all: errors on every rank name the one that failed first, and why.
    Where an exception ends this process's Python, the others are told. A process must not fork afterwards. May be used from any
    thread."""

    tells_of_exceptions = True  # whether an exception that ends this process's Python ends the work of the others

    def __init__(self, address: int, keeps: Any = None, of: Optional[Ranks] = None) -> None:
        """Use local(), linked() or along()."""
        self._handle = _RanksHandle(address, keeps, (lambda: None) if of is None else of.lend())
        self._finalizer = weakref.finalize(self, self._handle.close)
        self._of = of
        self.rank = int(self._ask("sluice_ranks_rank"))
        self.size = int(self._ask("sluice_ranks_size"))
        if of is None and self.tells_of_exceptions:
            _tell_of_exceptions(self)

    @classmethod
    def local(cls: type[R], descriptor: int, rank: int, *, silence: float = 30.0, patience: float = 600.0) -> R:
        """Joins the ranks of this machine by a descriptor of shared_memory(), which may be closed afterwards.

        silence: after so many seconds without a heartbeat a rank counts as failed.
        patience: after so many seconds a rank that is alive but does not take part counts as failed.
        """
        address = ctypes.c_void_p()
        options = _options(silence, patience)
        call("sluice_ranks_create_local", descriptor, rank, ctypes.byref(options), ctypes.byref(address))
        return cls(address.value or 0)

    @staticmethod
    def linked(links: Links, what: str, *, host: str = "", silence: float = 30.0, patience: float = 600.0) -> Ranks:
        """Joins ranks that the caller connects; what: the links' name in messages. The links are closed with the ranks.

        host: a name that is the same for all ranks of a host, which then share memory, so that the links join hosts only; all ranks
        wait for each other here. Where all ranks share memory, the links are closed at once. "" on all ranks: no ranks share memory.
        """
        address = ctypes.c_void_p()
        made = _functions_of(links, what, host)
        options = _options(silence, patience)
        call("sluice_ranks_create_links", ctypes.byref(made), ctypes.byref(options), ctypes.byref(address))
        return Ranks(address.value or 0, made)

    def along(self, mesh: str, axis: str) -> Optional[Ranks]:
        """Returns this rank and the ranks that differ from it along this axis of a mesh only, as a group: `rank` is then the place
        along the axis. None: this rank is alone there. An error that ends the group ends all ranks.

        mesh: the axes of all ranks, as "data=2,pipeline=4"; consecutive ranks differ in the last axis.
        """
        return along(self, mesh, axis)

    @property
    def all(self) -> Ranks:
        """The ranks from which along() made this group; else the object itself."""
        return self if self._of is None else self._of.all

    def close(self) -> None:
        """Leaves the ranks. The others can continue as long as they need nothing from this rank."""
        self._finalizer()

    @property
    def address(self) -> int:
        """The C handle. Raises StateError once it was closed."""
        if not self._handle.usable:
            raise StateError("the ranks were left, or belong to the process that this one was forked from; join anew")
        return self._handle.address

    @property
    def failure(self) -> str:
        """The rank that failed first, and why; "" where none has failed."""
        return text_of("sluice_ranks_failure", self.address)

    def traffic(self) -> Traffic:
        """The bytes that this rank has sent and received so far."""
        made = _abi.Traffic(ctypes.sizeof(_abi.Traffic))
        call("sluice_ranks_traffic", self.address, ctypes.byref(made))
        return Traffic(made.sent, made.received, made.sent_besides, made.received_besides, made.received_from_hosts)

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        """Returns the bytes that each rank gives. name: the purpose, for messages."""
        if len(own) > MOST_EXCHANGED:
            raise InvalidArgumentError(f"{len(own)} bytes are to be exchanged, and {MOST_EXCHANGED} are the most; broadcast them")
        gathered, sizes = ctypes.c_void_p(), (ctypes.c_size_t * self.size)()
        call("sluice_ranks_exchange", self.address, name.encode(), own, len(own), ctypes.byref(gathered), sizes)
        try:
            every = ctypes.string_at(gathered.value, sum(sizes)) if gathered.value else b""
        finally:
            library().sluice_text_destroy(gathered)
        ends = [sum(sizes[: rank + 1]) for rank in range(self.size)]
        return [every[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def agreed(self, name: str, make: Callable[[], T]) -> T:
        """Returns the result of make(), if it raises no sluice.Error on any rank; else raises an error on every rank.
        Collective, like exchange()."""
        problem: Optional[Error] = None
        try:
            made = make()
        except Error as error:
            problem = error
        texts = self.exchange(name, b"" if problem is None else str(problem).encode()[:4000])
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise StateError(f"rank {rank} has an error, so that no rank goes on: {text.decode('utf-8', 'replace')}")
        return made

    def broadcast(self, name: str, address: int, count: int) -> None:
        """Copies rank 0's bytes at its address to the other ranks' addresses; the count is the same on all ranks, and
        not limited."""
        call("sluice_ranks_broadcast", self.address, name.encode(), address, count)

    def barrier(self, name: str) -> None:
        """Waits until all ranks have called it."""
        call("sluice_ranks_barrier", self.address, name.encode())

    def send(self, to: int, name: str, address: int, count: int) -> Message:
        """Begins to send bytes to another rank. Messages of one name arrive in the order of the calls. The memory must stay
        unchanged until the message was awaited."""
        return self._message("sluice_ranks_send", to, name, address, count)

    def receive(self, source: int, name: str, address: int, count: int) -> Message:
        """Begins to receive as many bytes as that rank sends; they are there once the message was awaited."""
        return self._message("sluice_ranks_receive", source, name, address, count)

    def _message(self, function: str, other: int, name: str, address: int, count: int) -> Message:
        made = ctypes.c_void_p()
        call(function, self.address, other, name.encode(), address, count, ctypes.byref(made))
        return Message(self, made.value or 0)

    def fail(self, text: str) -> None:
        """Ends the work of all ranks, whose errors name this one and the text. Does nothing after close()."""
        if self._handle.usable:
            call("sluice_ranks_fail", self.address, text.replace("\0", " ").encode("utf-8", "replace"))

    def lend(self) -> Callable[[], None]:
        """Is called when an engine has been made with these ranks. Returns a function to call when the engine is
        gone."""
        self._handle.taken()
        return self._handle.given_back

    def _ask(self, question: str) -> int:
        answer = ctypes.c_uint32()
        call(question, self.address, ctypes.byref(answer))
        return answer.value


def along(ranks: Optional[Ranks], mesh: str, axis: str) -> Optional[Ranks]:
    """Ranks.along(), also where there is one rank (None)."""
    address = ctypes.c_void_p()
    of = None if ranks is None else ranks.address
    call("sluice_ranks_along", of, mesh.encode(), axis.encode(), ctypes.byref(address))
    return Ranks(address.value, of=ranks) if address.value else None


def check_deadlines(silence: float, patience: float) -> None:
    """Raises InvalidArgumentError for values that are not valid numbers of seconds to wait."""
    for name, seconds in (("silence", silence), ("patience", patience)):
        if not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
            raise InvalidArgumentError(f"{name} is {seconds!r}; it is a number of seconds above 0 and below 1e9")


def _options(silence: float, patience: float) -> _abi.RanksOptions:
    check_deadlines(silence, patience)
    return _abi.RanksOptions(ctypes.sizeof(_abi.RanksOptions), silence, patience)


def _functions_of(links: Links, what: str, host: str) -> _abi.Links:
    """Makes C functions of the links. Keeps the links, and the texts that it returned, alive."""
    texts: dict[int, bytes] = {}

    def guarded(run: Callable[..., None]) -> Callable[..., int]:
        def called(context: Any, *arguments: Any) -> int:
            try:
                run(*arguments)
                return 0
            except BaseException as error:  # no exception may pass through C
                traceback.print_exception(error)
                return 1

        return called

    def send(to: int, head: Any, head_bytes: int, body: Any, body_bytes: int, sent: Any) -> None:
        packet = ctypes.string_at(head, head_bytes) + (ctypes.string_at(body, body_bytes) if body_bytes else b"")
        sent[0] = 1 if links.send(to, packet) else 0

    def receive(source: int, packet: Any, count: Any) -> None:
        found = links.receive(source)
        if found is not None and len(found) > links.packet_bytes:
            raise CorruptError(f"a packet of {len(found)} bytes came from rank {source}; {links.packet_bytes} are the most")
        if found is not None:
            ctypes.memmove(packet, (ctypes.c_char * len(found)).from_buffer(found), len(found))
            count[0] = len(found)

    def gone(rank: int, how: Any, in_order: Any) -> None:
        found = links.gone(rank)
        if found is not None:
            texts.setdefault(rank, found[1].encode())
            how[0], in_order[0] = texts[rank], 1 if found[0] else 0

    made = _abi.Links(
        size=ctypes.sizeof(_abi.Links),
        what=what.encode(),
        rank=links.rank,
        ranks=links.size,
        packet_bytes=links.packet_bytes,
        send=_abi.SEND(guarded(send)),
        receive=_abi.RECEIVE(guarded(receive)),
        wait=_abi.WAIT(guarded(lambda microseconds: links.wait(microseconds / 1e6))),
        wake=_abi.WAKE(guarded(links.wake)),
        gone=_abi.GONE(guarded(gone)),
        destroy=_abi.LEAVE(guarded(links.close)),
        host=host.encode() or None,
    )
    return made


_living: weakref.WeakSet[Ranks] = weakref.WeakSet()
_hook: list[Callable[..., Any]] = []  # the previous exception hook


def _tell_of_exceptions(ranks: Ranks) -> None:
    """Tells the other ranks where an exception ends this process."""
    _living.add(ranks)
    if not _hook:
        _hook.append(sys.excepthook)
        sys.excepthook = _on_exception


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for ranks in list(_living):
        try:
            ranks.fail(f"{kind.__name__}: {error}"[:2000])
        except Exception:  # the exception itself must be shown
            continue
    _hook[0](kind, error, trace)
