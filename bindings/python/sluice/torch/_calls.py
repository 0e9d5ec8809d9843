"""Calls of a wrapped model and of its modules: what they need is there before they compute, and autograd keeps references to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _abi
from ..errors import Error, StateError
from ._backward import in_pass
from ._demand import Demand
from ._estimate import tensors_in
from ._guards import override
from ._homes import Home, View, has_memory, storage_of, written_by
from ._modes import Mode, is_compiled, outside_of_graphs
from ._presence import Presence
from ._units import calls_none, owners_around

_Owners = Mapping[torch.nn.Module, Sequence[int]]
_Place = tuple[torch.nn.Module, str, Home]  # a module, and the name and the home of a parameter that it has


@dataclasses.dataclass(eq=False)
class Owner:
    """The names, units and parameters that a module needs in its calls. It refers to modules, so that parameters must not refer to it:
    Python's collector does not look into all of them. (It is no tuple, into which torch.compile() would look.)"""

    name: str  # the module's, by which messages and other owners know it
    units: Mapping[int, int]  # the unit's access, as use_together() takes it
    places: Sequence[_Place]
    around: Collection[str] = ()  # the names of owners that the module is in
    is_model: bool = False
    needs_plan_alone: bool = False


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a module that has begun."""

    name: str
    before: Call | None  # what was on the GPU before it, and is after it
    outer: Call | None = None  # the call that it is in
    units: Mapping[int, int] = dataclasses.field(default_factory=dict)  # on the GPU in it, with those of the calls that it is in
    scope: Scope | None = None  # of a call of the model
    casts: Scope | None = None  # in which it has begun to attend to casts
    keeps: int | None = None  # see Demand.begin()


_RAISED = object()  # the output of a call that an exception has ended


class Calls:
    """The calls of one wrapped model. On the CPU a module's parameters come in when it is called, and go when others need the room.

    On a GPU are the units of the calls that have not ended; in a backward pass, of the call whose backward is computed, with the calls
    that it was in. A pass computes what calls have computed in the opposite order, so that one call's backward ends before that of
    the call before it begins."""

    def __init__(self, presence: Presence, demand: Demand) -> None:
        """demand: plans for calls."""
        self._presence, self._demand = presence, demand
        self._saved = SavedTensors(presence, self.bring_in, self.begin_pass)
        self._on_gpu = presence.engine.gpu is not None
        self._scopes: list[Scope] = []  # of the calls of the model that have not ended
        self._now: Call | None = None  # whose units are on the GPU
        self._begin_call, self._end_call = outside_of_graphs(self._begin), outside_of_graphs(self._end)

    def install(self, model: torch.nn.Module, owners: _Owners) -> None:
        """Lets calls bring in what they need. owners: which units belong to which modules on a GPU."""
        names = {module: f"'{name}'" if name else "the model" for name, module in model.named_modules()}
        made = self._owners_of_calls(names, owners) if self._on_gpu else self._owners_by_module(names)
        for module, owner in {model: Owner(names[model], {}, ()), **made}.items():
            owner.is_model = module is model
            owner.needs_plan_alone = not (owner.is_model or owner.places or self._on_gpu)
            run = functools.partial(type(module)._call_impl, module)
            override(module, "_call_impl", functools.partial(self._call, module, owner, run))
            if (compiled := module._compiled_call_impl) is not None:  # by module.compile(), before it was wrapped
                override(module, "_compiled_call_impl", functools.partial(self._call, module, owner, compiled))

    def _owners_by_module(self, names: Mapping[torch.nn.Module, str]) -> dict[torch.nn.Module, Owner]:
        """On the CPU: each module needs its own parameters. A block that was compiled before needs those of all that is in it, where they
        can be held at once: it is one graph then, in which nothing comes in."""
        made: dict[torch.nn.Module, Owner] = {}
        inside = {module: self._places_in(module.modules(), self._presence.by_id) for module in names}
        for module, name in names.items():
            if not self._demand.stated and inside[module]:
                made[module] = Owner(name, {}, ())  # a call of it from outside is planned for whole
            users = [module, *module.children()] if calls_none(module) else [module]
            if places := self._places_in(users, self._presence.by_id):
                made[module] = Owner(name, _units_of(places), places)
        for module, places in inside.items():
            if is_compiled(module) and places and len(_units_of(places)) <= self._presence.limit:
                for inner in module.modules():
                    made.pop(inner, None)
                made[module] = Owner(names[module], _units_of(places), places)
        return made

    def _owners_of_calls(self, names: Mapping[torch.nn.Module, str], owners: _Owners) -> dict[torch.nn.Module, Owner]:
        presence = self._presence
        presence.belongs_to = [""] * len(presence.engine.units)
        outside, made = owners_around(owners), {}
        for module, units in owners.items():
            for unit in units:
                presence.belongs_to[unit] = f"{names[module]} ({type(module).__name__})"
            mine = {key: home for key, home in presence.by_id.items() if not set(units).isdisjoint(home.units)}
            around = [names[outer] for outer in outside[module]]
            made[module] = Owner(names[module], dict.fromkeys(units, _abi.READ), self._places_in(module.modules(), mine), around)
        return made

    def _places_in(self, modules: Iterable[torch.nn.Module], homes: Mapping[int, Home]) -> list[_Place]:
        return [
            (module, name, homes[id(p)])
            for module in modules
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in homes
        ]

    def _call(self, module: torch.nn.Module, owner: Owner, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces Module._call_impl and what Module.compile() makes of it, which is `run`."""
        # A module compiled since keeps this function after close(). A module without parameters of its own needs a plan at most.
        if self._demand.estimating or self._presence.engine.left or (owner.needs_plan_alone and self._demand.inside):
            return run(*args, **kwargs)
        call, output = self._begin_call(module, owner, args, kwargs), _RAISED
        try:
            output = run(*args, **kwargs)
            return output
        except torch.OutOfMemoryError as error:
            if owner.is_model:
                self._demand.tell(error, (args, kwargs))
            raise
        finally:
            self._end_call(call, output)

    def _begin(self, module: torch.nn.Module, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        presence, call = self._presence, Call(owner.name, self._now)
        presence.users.__enter__()
        try:
            if presence.users.is_outermost():
                self._demand.inside = False  # Ctrl-C may have ended a call without its end
                if self._scopes:
                    raise StateError(
                        "a call of the wrapped model was interrupted (Ctrl-C) before it could end, and has left hooks of saved tensors in "
                        "its thread; make the model anew, in another process where that thread goes on, and load a checkpoint"
                    )
            is_in_pass = self.begin_pass()
            call.keeps = self._demand.begin(module, args, kwargs)
            presence.look()
            for has, name, home in owner.places:
                home.check_place(getattr(has, name, None))
            if self._on_gpu:
                self._begin_on_gpu(call, owner, is_in_pass)
            else:
                for unit in owner.units:
                    presence.use(unit)
                for _, _, home in owner.places:
                    home.check_memory()
            if owner.is_model:
                call.scope = Scope(self._saved)
                call.scope.__enter__()
                self._scopes.append(call.scope)
            if self._scopes and self._scopes[-1].begin_casts():
                call.casts = self._scopes[-1]
        except BaseException:
            self._end(call, _RAISED)
            raise
        return call

    def _begin_on_gpu(self, call: Call, owner: Owner, is_in_pass: bool) -> None:
        presence, around = self._presence, call.before
        presence.check_open()
        if presence.full:
            raise StateError(
                "a wrapped model is called within `with sluice.torch.full_parameters()`, where its parameters are on the CPU; call it "
                "after that"
            )
        presence.check_unwritten(home for _, _, home in owner.places)
        while is_in_pass and around is not None and around.name not in owner.around:
            around = around.outer  # a checkpoint computes a call again that was before or after that one
        call.outer, call.units = around, owner.units if around is None else {**around.units, **owner.units}
        self._go(call)

    def _end(self, call: Call, output: Any) -> None:
        """The call has ended with this output, or with _RAISED."""
        returned = output is not _RAISED
        try:
            if call.casts is not None:
                call.casts.end_casts()
            if call.scope is not None and self._scopes and self._scopes[-1] is call.scope:
                self._scopes.pop()
                call.scope.__exit__()
            if self._on_gpu:
                for tensor in tensors_in([[output]]) if returned else ():
                    if tensor.requires_grad and tensor.grad_fn is not None:
                        tensor.register_hook(functools.partial(self._begin_backward, call))
                self._go(call.before)
            if call.keeps is not None:
                self._demand.end(call.keeps, output if returned else None)
            if call.scope is not None and not self._scopes and not (self._on_gpu and in_pass()):
                with contextlib.nullcontext() if returned else contextlib.suppress(Error):  # the call's own error is told
                    self._presence.end_call()
        finally:
            self._presence.users.__exit__()

    # ---- backward passes ----

    def begin_pass(self) -> bool:
        """Comes in a backward pass, before it uses the model. After it what was there before is there. Returns whether this is in one."""
        return self._presence.users.begin_pass(functools.partial(self._go, self._now) if self._on_gpu else None)

    def _begin_backward(self, call: Call, gradient: torch.Tensor) -> None:
        self._presence.check_open()
        self.begin_pass()
        if torch.is_grad_enabled():
            raise StateError(
                "a backward pass of a model that is wrapped on a GPU makes a graph (create_graph=True), whose own backward would not "
                "find the parameters; wrap the model on the CPU for that"
            )
        if not _is_around(call, self._now):  # a module may return what the last one in it returns, whose backward has begun then
            self._go(call)

    def bring_in(self, home: Home) -> None:
        """Comes in a backward pass that needs a parameter."""
        presence = self._presence
        if self._on_gpu:
            presence.pinned = {*presence.pinned, *home.units}  # until the backward of the next call begins
        for unit in home.units:
            presence.use(unit)
        if home.index not in presence.full:
            home.check_memory()

    def _go(self, call: Call | None) -> None:
        self._now, self._presence.in_call = call, call is not None
        if not self._presence.engine.closed:
            self._presence.show({} if call is None else call.units)


def _is_around(call: Call, inner: Call | None) -> bool:
    """Whether one call was made in the other one, of whose units it has all."""
    outer = inner and inner.outer
    while outer is not None and outer is not call:
        outer = outer.outer
    return outer is not None


def calls_with(model: torch.nn.Module, parameter: torch.nn.Parameter) -> Callable[..., Any]:
    """Returns a function that calls another one, outside of the calls of a model on a GPU, with the parameter there: as a call of the
    module to which the parameter's unit belongs."""
    home: Home = parameter._sluice.presence.by_id[id(parameter)]  # type: ignore[attr-defined]
    for module in model.modules():
        if (made := vars(module).get("_call_impl")) is not None and not made.args[1].units.keys().isdisjoint(home.units):
            return functools.partial(made.func, *made.args[:2])
    raise AssertionError(f"the unit of '{home.name}' belongs to no module")


def _units_of(places: Iterable[_Place]) -> dict[int, int]:
    return dict.fromkeys(sorted({unit for _, _, home in places for unit in home.units}), _abi.READ)


# ---- what autograd saves: references to parameters, to views and casts of them, and other tensors as they are ----


class Cast(NamedTuple):
    """A cast of a parameter, or of a view of it, to another type."""

    home: Home
    source: View  # the view of the parameter's memory
    made: View  # the cast's view of memory of its own

    def make(self) -> torch.Tensor:
        """Makes the cast again, in other memory with the same layout."""
        made = torch.empty_strided(self.made.size, self.made.stride, dtype=self.made.dtype, device=self.home.memory.device)
        return made.copy_(self.source.over(self.home.memory))


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
    """A value that outer hooks of saved tensors keep for a tensor, and the hook that unpacks it."""

    kept: Any
    unpack: Callable[[Any], torch.Tensor]


class SavedTensors:
    """Autograd's saved tensors of the calls of one wrapped model. This object keeps the presence alive."""

    def __init__(self, presence: Presence, bring_in: Callable[[Home], None], begin_pass: Callable[[], object]) -> None:
        """bring_in: brings in a parameter that a backward pass needs; begin_pass: comes before a pass uses what was kept."""
        self.presence = presence
        self._bring_in, self._begin_pass = bring_in, begin_pass

    def reference(self, tensor: torch.Tensor, casts: Casts) -> _Saved | None:
        """The reference that autograd keeps to a parameter, a view of it, or a cast; None for any other tensor."""
        if tensor.layout != torch.strided or not has_memory(tensor):
            return None
        home, cast = self.presence.by_storage.get(storage_of(tensor)), None
        if home is None and (cast := casts.find(tensor)) is not None:
            home = cast.home
        return None if home is None else _Saved(home, home.version, cast, View.of(tensor))

    @outside_of_graphs
    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor for what was kept of it."""
        self._begin_pass()
        self.presence.look()
        if isinstance(saved, _Others):
            return saved.unpack(saved.kept)
        return _same_version(saved) if isinstance(saved, _Plain) else self._over(saved)

    def _over(self, saved: _Saved) -> torch.Tensor:
        home = saved.home
        if home.version != saved.version:
            raise RuntimeError(
                f"backward goes through a graph that was made before '{home.name}' was changed (by optimizer.step() or "
                "within full_parameters()), so its gradients would be wrong; run forward again"
            )
        try:
            self._bring_in(home)
        except StateError as error:
            raise StateError(f"'{home.name}' is needed: {error}") from None
        return saved.view.over(home.memory if saved.cast is None else saved.cast.make())


def _same_version(saved: _Plain) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, and was "
            f"saved at version {saved.version}"
        )
    return saved.tensor


class Scope:
    """Inside of the `with`, which is one call of the model, autograd keeps references."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._others = torch._C._autograd._top_saved_tensors_default_hooks(True)  # PyTorch itself calls the innermost hooks alone
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self._pack, saved.unpack)
        self._casts, self._casting = Casts(saved.presence.by_storage), False

    def __enter__(self) -> None:
        """Where hooks are not allowed (in transforms of torch.func), autograd keeps the parameters themselves, which are brought in when
        backward touches them."""
        try:
            self._hooks.__enter__()  # type: ignore[union-attr]
        except RuntimeError as why:
            self._hooks = None
            if self._saved.presence.engine.gpu is not None:
                raise StateError(
                    f"a model that is wrapped on a GPU is called where autograd keeps parameters themselves ({why}), which backward would "
                    "not find there; use torch.autograd.grad() in the place of a transform of torch.func, or wrap the model on the CPU"
                ) from None

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)

    def begin_casts(self) -> bool:
        """Attends to casts until end_casts(), and returns whether it does, which is where autocast is on and it has not begun yet. Autocast
        may be turned on inside of the model's forward, so that each module's call asks."""
        presence = self._saved.presence
        if self._casting or not torch.is_autocast_enabled(presence.engine.device.type):
            return False
        self._casts.begin(presence.keeps_casts)
        self._casting = True
        return True

    def end_casts(self) -> None:
        """Ends that."""
        self._casting = False
        self._casts.end()

    @outside_of_graphs  # also where the function that calls backward() is compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        self._saved.presence.look()
        reference = self._saved.reference(tensor, self._casts)
        if reference is not None:
            return reference
        if self._others is not None:
            return _Others(self._others[0](tensor), self._others[1])
        # An operation that keeps its own result would refer to itself: a graph that no backward frees would stay.
        return _Plain(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


# ---- casts of parameters by autocast, which are made again in backward ----


_CAST = torch.ops.aten._to_copy.default


class _KeptParameters(threading.local):
    """Lets a graph of torch.compile() that is made meanwhile keep the parameter for backward, and not a cast that one of its kernels makes
    and no mode sees. PyTorch keeps each patch of its settings forever, so a thread has one."""

    def __init__(self) -> None:
        self._patch = torch._functorch.config.patch(ban_recompute_materialized_backward=False)
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._patch.__enter__()
        self._depth += 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._patch.__exit__(*error)


_kept_parameters = _KeptParameters()


class Casts(Mode):
    """Notes, from begin() to end(), which tensors are casts of parameters or of views of them. Autocast's own cache, which would hold a copy
    of every parameter until its end, and add gradients of several uses in the narrow type, is off meanwhile."""

    def __init__(self, by_storage: Mapping[int, Home]) -> None:
        super().__init__()
        self._homes = by_storage
        self._casts: dict[int, tuple[StorageWeakRef, int, Cast]] = {}  # each with the version that it had
        self._cached = self._notes = False

    def begin(self, are_kept: bool) -> None:
        """are_kept: there is room for autograd to keep casts, so that none is noted."""
        self._cached, self._notes = torch.is_autocast_cache_enabled(), not are_kept
        torch.set_autocast_cache_enabled(False)
        _kept_parameters.__enter__()
        if self._notes:
            self.__enter__()

    def end(self) -> None:
        """Ends what begin() began."""
        if self._notes:
            self.__exit__(None, None, None)
        _kept_parameters.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(self._cached)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _CAST and has_memory(args[0]) and result.layout == torch.strided:
            home = self._homes.get(storage_of(args[0]))
            if home is not None and result.storage_offset() == 0:
                cast = Cast(home, View.of(args[0]), View.of(result))
                self._casts[storage_of(result)] = (StorageWeakRef(result.untyped_storage()), result._version, cast)
        for tensor in written_by(func, args, kwargs or {}) if self._casts else ():
            if has_memory(tensor) and tensor.layout == torch.strided:
                self._casts.pop(storage_of(tensor), None)
        return result

    def find(self, tensor: torch.Tensor) -> Cast | None:
        """The cast that the tensor is, or is a view of. A tensor that was written to since is no cast."""
        if not self._casts:
            return None
        made, version, cast = self._casts.get(storage_of(tensor), (None, 0, None))
        return cast if made is not None and not made.expired() and tensor._version == version else None
