"""What autograd keeps of a wrapped model: references to parameters, and other tensors as they are."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .. import _abi
from ..errors import Error, StateError
from ._absent import storage_of
from ._casts import Cast, Casts
from ._demand import Demand
from ._homes import Home, View, has_memory
from ._hooks import Hooks, Ours, innermost, listen, push, refusal
from ._looking import Announced, Units
from ._presence import Presence
from ._shortage import Shortage
from ._stances import outside_of_graphs


class _Saved(NamedTuple):
    """The reference that autograd keeps to a parameter, a view of it, or a cast."""

    home: Home
    version: int
    cast: Cast | None
    view: View  # the view of the parameter's memory, or of the cast's


class _Plain(NamedTuple):
    """Another tensor that autograd keeps, with the version that it must still have in backward."""

    tensor: torch.Tensor
    version: int


class _Others(NamedTuple):
    """What outer hooks of saved tensors keep of a tensor, and how they unpack it."""

    kept: Any
    unpack: Callable[[Any], torch.Tensor]


class _Pair(Ours):
    """Hooks that keep references to parameters, and give all else to the hooks below them."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._others: Hooks | None = innermost()

    def push(self) -> None:
        """Brings them into force in this thread."""
        push((self._pack, self._saved.unpack))

    def rebase(self, ended: list[Hooks]) -> None:
        """As the base's."""
        if any(self._others is not None and self._others[0] == hooks[0] for hooks in ended):
            self._others = innermost()

    def _reference(self, tensor: torch.Tensor) -> _Saved | None:
        return self._saved.reference(tensor)

    @outside_of_graphs  # also where the function that calls backward() is compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        reference = self._reference(tensor)
        if reference is not None:
            return reference
        if self._others is not None:  # PyTorch itself calls the innermost hooks alone
            return _Others(self._others[0](tensor), self._others[1])
        # An operation that keeps its own result would refer to itself: a graph that no backward frees would stay.
        return _Plain(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


class _Node(_Pair):
    """The hooks while a node of a backward pass computes on a GPU: where it makes a graph, or computes again what a checkpoint has
    left out, it keeps parameters, too. PyTorch itself ends them with the node, in whatever thread, and also where it fails."""

    ends_with_outer = False

    def __init__(self, saved: SavedTensors, number: int) -> None:
        """number: of the backward pass."""
        super().__init__(saved)
        self.number, self.sequence = number, torch._C._current_autograd_node()._sequence_nr()
        self._units: dict[int, int] = {}  # which the node has asked for

    def use(self, units: Sequence[int]) -> None:
        """Makes these units present together with those that the node has asked for before: it computes when it has all."""
        presence, node = self._saved.presence, torch._C._current_autograd_node()
        self._units.update(dict.fromkeys(units, _abi.READ))
        if len(self._units) > presence.limit:  # is an error, which names those that follow, too
            for kept in (each.data for each in getattr(node, "_raw_saved_tensors", ())):
                if isinstance(kept, _Saved) and presence.by_id.get(id(kept.home.parameter)) is kept.home:
                    self._units.update(dict.fromkeys(kept.home.units, _abi.READ))
        presence.use_together(self._units, node.name())


class _Scope(_Pair):
    """One call of the model. PyTorch is asked which hooks and modes there are, since a KeyboardInterrupt may come between
    any two lines that note them."""

    def __init__(self, saved: SavedTensors, inside: torch.nn.Module | None = None) -> None:
        """inside: it is a call of this module, within one of the model or in a backward pass."""
        super().__init__(saved)
        self.inside, self.ends_with_outer = inside, inside is not None
        self._casts = Casts(saved.by_storage)
        self._casting: list[torch.nn.Module] = []  # modules whose calls began under autocast, and have not ended

    def open(self, model: torch.nn.Module) -> None:
        """Makes autograd keep references. Where hooks are not allowed (in transforms of torch.func), it keeps the parameters
        themselves, which are brought in when backward touches them."""
        if self._saved.hooks_are_allowed("a model that is wrapped on a GPU is called", "use torch.autograd.grad()"):
            self.push()
        self.begin_module(model)

    def begin_module(self, module: torch.nn.Module) -> None:
        """Notes casts until the module's call ends. Autocast may be turned on inside of the model's forward, and a mode must
        end where it began."""
        if self._casting or torch.is_autocast_enabled("cpu" if self._saved.gpu is None else self._saved.gpu.device.type):
            self._casting.append(module)
            if len(self._casting) == 1:
                self._casts.__enter__()

    def end_module(self, module: torch.nn.Module) -> None:
        """Ends the module's call, and calls inside it that an exception ended."""
        if module in self._casting:
            while self._casting.pop() is not module:
                pass
            if not self._casting:
                self._end_casts()

    def _end_casts(self) -> None:
        if _get_current_dispatch_mode() is self._casts:
            self._casts.__exit__(None, None, None)

    def close(self) -> None:
        """Removes the hooks and the mode, after those that came later."""
        self._end_casts()
        self.remove()

    def _reference(self, tensor: torch.Tensor) -> _Saved | None:
        return self._saved.reference(tensor, self._casts)


class _Calls(threading.local):
    """The calls of the model in this thread that have not ended."""

    def __init__(self) -> None:
        self.open: list[_Scope] = []
        self.unpacks = 0  # how many hooks of others unpack a tensor
        self.node: _Node | None = None  # the node that is computed, where hooks may not come into force


class _Call:
    """A call of the model, as far as it has begun."""

    def __init__(self) -> None:
        self.before: int | None = None  # how many calls the thread was in; None: it has not begun, or has ended
        self.depth = 0  # and how many of modules
        self.turn: int | None = None  # what it has of Turns.begin()
        self.is_seen = False  # its operations are looked at: nothing that the call is in may compile it
        self.returned = False
        self.output: Any = None


class SavedTensors:
    """The hooks of saved tensors of one wrapped model, in each thread that calls it. They keep the presence alive."""

    def __init__(
        self, presence: Presence, demand: Demand, shortage: Shortage, note: Callable[[], None] | None = None
    ) -> None:
        """demand: plans for calls; shortage: says what a call lacks of a GPU's memory; note: is called before a backward pass gives its first gradient, wherever it has saved tensors
        or calls modules."""
        self.presence, self._demand, self._shortage, self._note = presence, demand, shortage, note
        self.by_storage = presence.by_storage
        self.gpu = presence.engine.gpu  # where the parameters are; None: in the memory of the CPU
        self._calls = _Calls()
        self._open: set[_Scope] = set()  # the calls of all threads
        self._after_begin: Units = {}  # what hooks use before the model's own hook, see Announced
        self._after_end: Units = {}  # and what is used after a call of the model within another one
        if self.gpu is not None:
            listen(self._cover)

    def begin(self, model: torch.nn.Module) -> None:
        """Begins a call of the model in this thread."""
        scopes = self._calls.open
        scopes.append(_Scope(self))
        self._open.add(scopes[-1])
        scopes[-1].open(model)

    def begin_inside(self, module: torch.nn.Module) -> None:
        """Begins a call of one of the model's modules in this thread, where other hooks of saved tensors than those of the call that
        it is in are in force, such as those of torch.utils.checkpoint."""
        scopes, top = self._calls.open, innermost()
        if not (scopes and scopes[-1].is_on(top)):
            scopes.append(_Scope(self, module))
            self._open.add(scopes[-1])
            scopes[-1].open(module)

    def end_inside(self, module: torch.nn.Module) -> None:
        """That call ends."""
        if self._calls.open and self._calls.open[-1].inside is module:
            self.end()

    def end(self) -> None:
        """Ends this thread's innermost call of the model."""
        scopes = self._calls.open
        if scopes:
            scopes[-1].close()
            self._open.discard(scopes[-1])
            scopes.pop()

    @property
    def idle(self) -> bool:
        """Whether no thread is in a call of the model."""
        return not self._open

    def end_interrupted(self) -> None:
        """Comes before a call, and before the model is closed. Ends a call of a module by itself that was interrupted in this thread,
        where PyTorch has run no hook."""
        if self._announced is not None and not self.in_model and (not self._calls.open or self._announced.is_interrupted):
            while self._calls.open:
                self.end()
            self._announced.end_to(0)

    @property
    def in_model(self) -> bool:
        """Whether this thread is in a call of the model itself, which ends in any case."""
        scopes = self._calls.open
        return bool(scopes) and scopes[0].inside is None

    def begin_module(self, module: torch.nn.Module) -> None:
        """Begins a call of one of the model's modules that have parameters, in this thread."""
        if self._note is not None:
            self._note()
        if scopes := self._calls.open:
            scopes[-1].begin_module(module)

    def end_module(self, module: torch.nn.Module) -> None:
        """That call ends."""
        if scopes := self._calls.open:
            scopes[-1].end_module(module)

    def guard(self, model: torch.nn.Module, announced: Announced | None, ended: Callable[[], None]) -> None:
        """Lets calls of the model begin before all hooks and end after them, also where PyTorch runs none, as after a KeyboardInterrupt.
        announced: where a GPU computes; ended: comes when no thread is in a call any more."""
        self._announced, self._ended = announced, ended
        self._begin_call = outside_of_graphs(self._begin)
        self._end_call = outside_of_graphs(self._end)
        # This must not refer to the model: its parameters refer to this, and Python's collector does not look into all of them.
        self._run_seen = outside_of_graphs(type(model)._call_impl)
        model.__dict__["_call_impl"] = functools.partial(self._call, model, functools.partial(type(model)._call_impl, model))
        if model._compiled_call_impl is not None:  # by model.compile(), before it was wrapped
            model._compiled_call_impl = functools.partial(self._call, model, model._compiled_call_impl)

    def _call(self, model: torch.nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces Module._call_impl and what Module.compile() makes of it, which is `run`. This thread has the turn until all that
        belongs to the call has ended."""
        if self._demand.estimating:
            return run(*args, **kwargs)
        call = _Call()
        try:
            try:
                self._begin_call(call, model, args, kwargs)
                call.output = self._run_seen(model, *args, **kwargs) if call.is_seen else run(*args, **kwargs)
                call.returned = True
                return call.output
            finally:
                self._end_call(call, model)
        except torch.OutOfMemoryError as error:
            self._end_call(call, model)
            told = self._shortage.told(error, (args, kwargs))
            if told is error:
                raise
            raise told from error
        finally:
            self._end_call(call, model)  # a KeyboardInterrupt may have come in the middle of that

    def _begin(self, call: _Call, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        announced = self._announced
        if announced is not None:
            self.presence.check_open()  # of what is held already nobody asks the engine any more
            self.end_interrupted()
            call.depth = announced.depth()
        call.before = len(self._calls.open)
        if announced is not None:
            call.turn = announced.turns.begin()
        self._demand.begin(model, args, kwargs)
        self._shortage.begin(args, kwargs)
        if announced is not None:
            call.is_seen = announced.look(model, args, kwargs)
            announced.begin(self, self._after_begin)
        self.begin(model)

    def _end(self, call: _Call, model: torch.nn.Module) -> None:
        """Ends what has begun of the call. Does nothing where all has ended."""
        if call.before is None:
            return
        try:
            while len(self._calls.open) > call.before:
                self.end()
            if self._announced is not None:
                self._announced.end_to(call.depth, self._after_end, call.returned)
            self._demand.end(model, call.output)
            if self.idle:
                with contextlib.nullcontext() if call.returned else contextlib.suppress(Error):  # the call's own error is told
                    self._ended()
        finally:
            if self._announced is not None and call.turn is not None:
                self._announced.turns.end(call.turn)
        call.before = None

    def _cover(self) -> None:
        """Comes after hooks of others have come into force in this thread. Where it computes with the model, they would keep
        parameters themselves."""
        at_work = self._calls.open or self._calls.unpacks or torch._C._current_autograd_node() is not None
        if at_work and not self.presence.engine.closed:
            _Pair(self).push()

    def hooks_are_allowed(self, what: str, instead: str) -> bool:
        """Whether hooks may come into force here. Raises StateError where they must: what happens here, and what to do instead."""
        why = refusal()
        if why is not None and self.gpu is not None:
            raise StateError(
                f"{what} where autograd keeps parameters themselves ({why}), which backward would not find there; {instead}, or "
                "wrap the model on the CPU"
            )
        return why is None

    def reference(self, tensor: torch.Tensor, casts: Casts | None = None) -> _Saved | None:
        """The reference that autograd keeps to a parameter, a view of it, or a cast; None for any other tensor."""
        if tensor.layout != torch.strided or not has_memory(tensor):
            return None
        home, cast = self.by_storage.get(storage_of(tensor)), None
        if home is None and casts is not None and (cast := casts.find(tensor)) is not None:
            home = cast.home
        return None if home is None else _Saved(home, home.version, cast, View.of(tensor))

    @outside_of_graphs
    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor for what was kept of it."""
        if self._note is not None:
            self._note()
        node = None if self.gpu is None else self._node()
        if isinstance(saved, _Others):
            return self._unpack_by_others(saved, node)
        return _same_version(saved) if isinstance(saved, _Plain) else self._bring_in(saved, node)

    def _node(self) -> _Node | None:
        """The hooks of the node of a backward pass that this thread computes, which it brings into force first, if it computes one."""
        if torch._C._current_autograd_node() is None:
            return None
        number: int = torch._C._current_graph_task_id()
        owner = getattr((innermost() or (None,))[0], "__self__", None)
        if type(owner) is _Node and owner._saved is self and owner.number == number:  # each node begins with those before its pass
            return owner
        if self.presence.engine.closed:
            return None
        made = _Node(self, number)
        if not torch.is_grad_enabled() and refusal() is not None:
            if (node := self._calls.node) is None or (node.number, node.sequence) != (number, made.sequence):
                self._calls.node = made
            return self._calls.node
        what = "a backward pass of a model that is wrapped on a GPU makes a graph (create_graph=True)"
        if self.hooks_are_allowed(what, "allow hooks of saved tensors there"):
            made.push()
        return made

    def _unpack_by_others(self, saved: _Others, node: _Node | None) -> torch.Tensor:
        self._calls.unpacks += 1
        try:
            tensor = saved.unpack(saved.kept)
        finally:
            self._calls.unpacks -= 1
        if node is not None:
            node.use([])  # what a checkpoint has computed again may have had the room of what the node has asked for
        return tensor

    def _bring_in(self, saved: _Saved, node: _Node | None) -> torch.Tensor:
        home = saved.home
        if home.version != saved.version:
            raise RuntimeError(
                f"backward goes through a graph that was made before '{home.name}' was changed (by optimizer.step() or "
                "an edit), so its gradients would be wrong; run forward again"
            )
        try:
            if node is not None:
                node.use(home.units)
            else:
                for unit in home.units:
                    self.presence.use(unit)
        except StateError as error:
            raise StateError(f"'{home.name}' is needed: {error}") from None
        if home.moved:
            home.check_memory()
        return saved.view.over(home.memory if saved.cast is None else saved.cast.make())


def _same_version(saved: _Plain) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, and was "
            f"saved at version {saved.version}"
        )
    return saved.tensor
