"""Looks at the arguments of operations for parameters, where a GPU computes: touches of its memory cannot be served."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._dynamo.eval_frame import DynamoStance
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from .. import _abi
from ..errors import StateError
from ._estimate import kind_of
from ._homes import Home
from ._modes import Mode, enter_below, leave_below
from ._presence import Presence
from ._stances import EAGER, SEEN, is_traced

Units = dict[int, None]  # units in the order of their uses


class Looking(Mode):
    """While it is active, each operation of its thread finds the parameters that it uses present. Uses are noted with the
    latest beginning or end of a module's call, which brings these units in from then on: see Announced."""

    def __init__(self, presence: Presence, announced: Announced) -> None:
        super().__init__()
        self._presence, self._announced = presence, announced
        self.is_on = True

    def is_of(self, announced: Announced) -> bool:
        """Whether it looks for this one's model."""
        return self._announced is announced

    @property
    def stance(self) -> DynamoStance | None:  # type: ignore[override]
        """None: it does nothing. So it is within a graph, and after the call where the mode is left on the stack: another mode kept it from
        being taken away, or PyTorch ran no hook at the end."""
        return SEEN if self.is_on and not self._announced.is_interrupted else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views count as uses: one that is made while its unit is absent would show NaN for ever.
        used: Units = {}
        for home, written in () if self.stance is None else _homes_in(self._presence, func, args, kwargs or {}):
            if written:
                raise StateError(
                    f"'{home.name}' is written by {func} in a call or in a backward pass of the model, whose parameters are on a GPU, "
                    "where a write is not seen; write it before or after, within `with sluice.torch.edit(model):`"
                )
            used.update(dict.fromkeys(home.units))
        if used:
            self._announced.note(used, f"{func}")
        return func(*args, **(kwargs or {}))


class Editing(Mode):
    """While it is active, each operation of its thread finds the parameters that it uses present, and what it writes becomes
    their values. Nothing is compiled, also where the user sets another stance meanwhile: nobody would see which parameters a graph
    uses, and not all are there."""

    stance: DynamoStance | None = EAGER

    def __init__(self, presence: Presence) -> None:
        super().__init__()
        self._presence = presence

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used: dict[int, int] = {}
        for home, written in () if _only_views(func) else _homes_in(self._presence, func, args, kwargs or {}):
            for unit in home.units:
                used[unit] = max(used.get(unit, _abi.READ), _abi.EDIT if written else _abi.READ)
        with torch.no_grad():  # an edit begins no step
            self._presence.use_together(used, f"{func}")
        return func(*args, **(kwargs or {}))


def _homes_in(presence: Presence, func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Home, bool]]:
    """The homes of the parameters among an operation's arguments, and whether it writes them."""
    for index, given in enumerate((*args, *kwargs.values())):
        for tensor in tree_iter(given) if isinstance(given, (list, tuple, dict)) else (given,):
            if (home := presence.home_of(tensor)) is not None:
                yield home, _writes(func, index, len(args), list(kwargs))


def _only_views(func: Any) -> bool:
    """Whether the operation makes a view, and reads nothing."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return False
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _writes(func: Any, index: int, positional: int, names: list[str]) -> bool:
    """Whether the operation writes this argument. Operators with bodies (torch.cond, flex_attention) write none."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return False
    arguments = func._schema.arguments
    if index < positional:
        info = arguments[index].alias_info
    else:
        info = next(a.alias_info for a in arguments if a.name == names[index - positional])
    return info is not None and bool(info.is_write)


class _Thread(threading.local):
    """What a thread is in."""

    def __init__(self) -> None:
        self.open: list[object] = []  # the modules whose calls have not ended
        self.latest: Units = {}  # the units of the latest beginning or end of a call
        self.looking: Looking | None = None
        self.turn: int | None = None  # what the outermost call of a module by itself has of Turns.begin()
        self.has_more = False  # the call that is looked at uses more units between two beginnings or ends than may be held
        self.kind: _Kind | None = None  # of the outermost call


class _Kind(NamedTuple):
    """What calls have in common that use parameters alike."""

    in_backward: bool  # it is computed again there, and ends by an exception as soon as enough is
    call: Any


class Announced:
    """Which units are used after each beginning and each end of a module's call, until the next one. The first call of each
    kind finds it, by looking at every operation; then these units are brought in there, before anything uses them. Where they
    are more than may be held, all calls of the kind are looked at, and what is too many comes in when it is used. A call that takes
    another way is looked at from where it uses what is absent, and so is the next one of its kind. A thread has the turn during its
    outermost call."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self.turns = presence.turns
        self._known: set[_Kind] = set()  # the kinds of calls that were looked at from beginning to end
        self._thread = _Thread()
        presence.serve = self._serve

    @property
    def outermost(self) -> bool:
        """Whether this thread is in no call."""
        return not self._thread.open

    def begin(self, module: object, units: Units) -> None:
        """A module's call begins, for which these units are brought in."""
        self._thread.open.append(module)
        self._next(units)

    def end(self, module: object, units: Units, output: Any) -> None:
        """The module's call has ended with this output, or, with None, an exception has ended it and those inside."""
        opened = self._thread.open
        if module in opened:
            while opened.pop() is not module:
                pass
        try:
            self._next(units)
        finally:
            if not opened:
                self._stop(output is not None)

    def depth(self) -> int:
        """How many calls this thread is in."""
        return len(self._thread.open)

    def end_to(self, depth: int, units: Units | None = None, whole: bool = False) -> None:
        """Ends calls until the thread is in so many, also those for which PyTorch has run no hook, as after a KeyboardInterrupt. units:
        of what follows then; whole: the call that ends has a result."""
        del self._thread.open[depth:]
        if depth == 0:
            self._stop(whole)
        elif units is not None:
            self._next(units)

    @property
    def is_interrupted(self) -> bool:
        """Whether a module's call by itself has ended in this thread, for which PyTorch has run no hook."""
        return self._thread.turn is not None and not self.turns.is_on(self._thread.turn)

    def begin_turn(self) -> None:
        """Comes before a module's call that is not within one of the model. Where it is the outermost one this thread has the turn until
        it ends."""
        if self.outermost and self._thread.turn is None:
            self._thread.turn = self.turns.begin()

    def look(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Comes before a module's call. Begins looking in this thread, until the call ends, where it is the outermost one, unless
        one of its kind was looked at. Returns whether it is looked at."""
        if not self.outermost or self._thread.looking is not None:
            return self._thread.looking is not None
        kind = _Kind(torch._C._current_graph_task_id() != -1, kind_of(module, args, kwargs, torch.is_grad_enabled())[0])
        self._thread.kind, self._thread.has_more = kind, False
        if kind in self._known or is_traced():
            return False
        self._thread.looking = looking = Looking(self._presence, self)
        looking.__enter__()
        return True

    def pause(self) -> None:
        """Stops looking until resume(): what follows is a graph of torch.compile(), of which one operation may be many."""
        if (looking := self._thread.looking) is not None:
            looking.is_on = False

    def resume(self) -> None:
        """Looks on after pause()."""
        if (looking := self._thread.looking) is not None:
            looking.is_on = True

    def _stop(self, whole: bool) -> None:
        turn, self._thread.turn = self._thread.turn, None
        try:
            self._stop_looking(whole)
        finally:
            if turn is not None:
                self.turns.end(turn)

    def _stop_looking(self, whole: bool) -> None:
        looking, self._thread.looking = self._thread.looking, None
        kind, self._thread.kind = self._thread.kind, None
        if looking is None or kind is None:
            return
        if (whole or kind.in_backward) and not self._thread.has_more:
            self._known.add(kind)
        looking.is_on = False
        leave_below(looking)

    def _next(self, units: Units) -> None:
        self._thread.latest = units
        self._presence.use_together(dict.fromkeys(units, _abi.READ), "what follows a module's call")

    def _serve(self, units: Units, what: str) -> bool:
        """Brings in what an operation uses, some of which it finds absent, where this thread is in a call or in a backward pass."""
        # What a pass calls at its end, by queue_callback(), is outside of its nodes: nothing would tell how long it looks.
        if self.outermost and torch._C._current_autograd_node() is None:
            return False
        if not is_traced():
            self._look_on()
        self.note(units, what)
        return True

    def _look_on(self) -> None:
        """Looks at what follows in a call, or in a function that autograd calls: it may use what it makes a view of now after that was
        taken away."""
        if self.outermost:
            if not self._is_looked_at():  # PyTorch ends modes that begin in a node of autograd with the node
                enter_below(Looking(self._presence, self))
        elif self._thread.looking is None and self._thread.kind is not None:
            self._known.discard(self._thread.kind)
            self._thread.has_more = True  # it is not looked at from its beginning
            self._thread.looking = Looking(self._presence, self)
            enter_below(self._thread.looking)

    def _is_looked_at(self) -> bool:
        return any(isinstance(mode, Looking) and mode.is_of(self) for mode in _get_current_dispatch_mode_stack())

    def note(self, units: Units, what: str) -> None:
        """An operation uses these units now. what: the operation, for messages."""
        if self.outermost:  # in a backward pass
            self._presence.use_together(dict.fromkeys(units, _abi.READ), what)
            return
        together = {**self._thread.latest, **units}
        if len(together) <= self._presence.limit:
            self._thread.latest.update(units)
        else:
            self._thread.has_more, together = True, units
        self._presence.use_together(dict.fromkeys(together, _abi.READ), what)


@contextlib.contextmanager
def editing(presence: Presence) -> Iterator[None]:
    """Inside of the `with` operations read and write parameters wherever they are."""
    if presence.engine.gpu is None:
        yield
        return
    with presence.turns:
        presence.check_unwritten(presence.homes)
        presence.edits += 1
        try:
            presence.reveal_all()
            with Editing(presence):
                yield
        finally:
            presence.edits -= 1
            presence.conceal_all()
            for home in presence.homes:
                home.note_values()


def is_editing() -> bool:
    """Whether this thread is within editing()."""
    return isinstance(_get_current_dispatch_mode(), Editing)


@contextlib.contextmanager
def reading(presence: Presence) -> Iterator[None]:
    """Inside of the `with` parameters may be read, wherever they are."""
    with torch.no_grad(), editing(presence):
        yield


@contextlib.contextmanager
def edited(presence: Presence) -> Iterator[None]:
    """Inside of the `with` parameters may be written; the optimizer's masters follow afterwards."""
    with presence.turns:
        presence.release_all()
        try:
            with editing(presence):
                yield
        finally:
            presence.release_all()
            presence.changed()
