"""Moves a model's parameters into an engine, with their values, or back where wrapping fails; and gives first values to what was built on
the meta device, by the model's own rules, as far as these are known."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _abi
from ..errors import Error, InvalidArgumentError
from ..model import Unit
from ._engine import ModelEngine
from ._homes import Home, Span
from ._modes import Mode
from ._presence import Presence
from ._safetensors import InFiles
from ._units import Group

_UNSET = 0xA5  # every byte of an integer buffer without values
_KNOWN = ("torch", "peft")  # packages whose constructors only follow their rules
_Rule = Callable[[], Any]
DRAWN = "_sluice_drawn"  # an attribute of parameters of other ranks, on the meta device, which take random numbers nevertheless

Places = Mapping[int, list[tuple[torch.nn.Module, str]]]


def places_of(model: torch.nn.Module) -> Places:
    """By the id of each parameter, the modules that have it and its name there (several where it is tied)."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return places


def put(places: Places, parameter: torch.nn.Parameter, instead: torch.nn.Parameter) -> None:
    """Puts a parameter in the place of another in all modules."""
    for module, name in places[id(parameter)]:
        setattr(module, name, instead)


def replace(places: Places, parameter: torch.nn.Parameter, memory: torch.Tensor) -> torch.nn.Parameter:
    """Makes a parameter over `memory`, and puts it in the place of one that is on the meta device, or will be."""
    made = torch.nn.Parameter(memory, requires_grad=parameter.requires_grad)
    put(places, parameter, made)
    return made


def _carry_over(parameter: torch.nn.Parameter, made: torch.nn.Parameter) -> None:
    """Gives a parameter the class, attributes and hooks of the one on the meta device that it replaces. Hooks are shared,
    so that handles that remove them stay valid."""
    made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


class Moving:
    """Gives each unit its values, and then its parameters the engine's memory, which frees their own. undo() brings all
    of them back, wherever moving stopped."""

    def __init__(self, model: torch.nn.Module, engine: ModelEngine) -> None:
        self._engine = engine
        self._device = engine.device
        self._places = places_of(model)
        self._homes: list[Home] = []
        self._were: dict[int, torch.device] = {}  # where each home's parameter was
        self._on_meta: dict[int, torch.nn.Parameter] = {}  # the parameters that homes' parameters replaced, by home
        self._empty = [p for p in model.parameters() if p.is_meta and not p.numel()]
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.is_meta or buffer.device.type != self._device.type
        ]

    def move_in(self, groups: Sequence[Group], train: bool, stored: Mapping[str, InFiles]) -> list[Home]:
        """Moves all parameters. stored: where values lie that are in files, by names. Returns their homes."""
        index, spans = 0, []
        for u, (unit, group) in enumerate(zip(self._engine.units, groups, strict=True)):
            self._set_values(unit, dict(group.parameters), stored)
            for declared, (name, given) in zip(unit.parameters, group.parameters, strict=True):
                spans.append(Span(index, declared.key, u, declared.first, declared.elements))
                index += 1
                if group.ends_parameters:
                    self._move(name, given, spans, train, declared.by_elements)
                    spans = []
            if self._engine.gpu is not None:
                self._engine.gpu.give_back()
        for p in self._empty:
            _carry_over(p, replace(self._places, p, torch.empty(p.shape, dtype=p.dtype, device=self._device)))
        moved: dict[int, torch.Tensor] = {}  # a buffer that several modules have stays one
        for module, name, buffer in self._buffers:
            if not buffer.is_meta:
                setattr(module, name, moved.setdefault(id(buffer), buffer.to(self._device)))
        return self._homes

    def _set_values(self, unit: Unit, parameters: Mapping[str, torch.nn.Parameter], stored: Mapping[str, InFiles]) -> None:
        """Gives parameters their own values, or those in files; or NaN where there are none, until a rule of the model gives some."""
        declared = {p.key: p for p in unit.parameters}
        own = {name: p.detach().reshape(-1) for name, p in parameters.items() if not p.is_meta}

        def fill(key: str, at: int, part: memoryview) -> None:
            run, name, first = torch.frombuffer(part, dtype=torch.float32), declared[key].name, declared[key].first + at
            if name in stored:
                stored[name].read(first, run)
            elif name in own:
                run.copy_(own[name][first : first + len(run)])
            else:
                run.fill_(math.nan)

        self._engine.set_values(unit.name, fill)

    def _move(self, name: str, given: torch.nn.Parameter, spans: list[Span], train: bool, by_elements: bool) -> None:
        memory = self._engine.tensor(spans, tuple(given.shape), given.dtype)
        index, p = len(self._homes), given
        self._were[index] = given.device
        if given.is_meta:
            self._on_meta[index] = given
            p = replace(self._places, given, memory)
            _carry_over(given, p)
        else:
            given.data = memory
        self._homes.append(Home(name, index, spans, p, p.data, train and p.requires_grad, by_elements))

    def undo(self) -> list[str]:
        """Gives the model parameters of its own again, with the engine's values or on the meta device as before, and closes
        the engine. Returns the names of those whose values the engine has lost, which are on the meta device then."""
        values = self._values()
        lost = []
        for home in self._homes:
            home.parameter.__dict__.pop("_sluice", None)
            home.let_go()
            if home.index in self._on_meta:
                put(self._places, self._on_meta[home.index], self._on_meta[home.index])
            elif home.index in values:
                home.parameter.data = values[home.index]
            else:
                lost.append(home.name)
                replace(self._places, home.parameter, torch.empty_like(home.parameter, device="meta"))
        for p in self._empty:
            put(self._places, p, p)
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer)
        self._engine.close()
        return lost

    def _values(self) -> dict[int, torch.Tensor]:
        """The values of parameters that had some before, by their homes' indices, as far as the engine still has them."""
        wanted = [home for home in self._homes if home.index not in self._on_meta]
        values = {
            home.index: torch.empty_like(home.memory, memory_format=torch.contiguous_format, device=self._were[home.index])
            for home in wanted
        }
        places = {span.key: (home.index, span) for home in wanted for span in home.spans}

        def take(key: str, first: int, part: memoryview) -> None:
            if key in places:
                index, span = places[key]
                run = torch.frombuffer(bytearray(part), dtype=torch.float32)
                span.of(values[index].view(-1))[first : first + len(run)] = run

        for unit in sorted({unit for home in wanted for unit in home.units}):
            try:
                self._engine.get_values(self._engine.units[unit].name, take)
            except Error:
                for home in wanted:
                    if unit in home.units:
                        values.pop(home.index, None)
        return values


# ---- first values ----


def check_rules(model: torch.nn.Module, stored: Container[str]) -> None:
    """Raises InvalidArgumentError that names what is on the meta device and has no rule. stored: the names of what gets
    its values from files."""
    for path, module in _without_rule(model, ""):
        own = [*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False)]
        if any(t.is_meta and t.numel() and name not in stored for name, t in own):
            raise InvalidArgumentError(
                f"'{path}' ({type(module).__name__}) is on the meta device, and neither it nor a module around it has a "
                "reset_parameters() or _init_weights(module), which would give it its first values; add one, or build "
                "this module on the CPU"
            )


def _without_rule(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    if not _rules_of(module):
        yield path, module
        for name, child in module.named_children():
            yield from _without_rule(child, f"{path}.{name}" if path else name)


def give_first_values(
    model: torch.nn.Module, unset: Sequence[Home], stored: Mapping[str, InFiles], presence: Presence
) -> None:
    """Gives values to parameters without any (each element is NaN), and to buffers on the meta device, which have them in
    files where their names are in `stored`, and are where parameters are. Children come before parents, as in construction. Rules change
    no other parameter.

    Raises InvalidArgumentError that names what no rule gave a value. Warns where constructors may do what no rule does.
    """
    drawn = [p for p in model.parameters() if hasattr(p, DRAWN)]
    ids = {id(home.parameter) for home in unset} | set(map(id, drawn))
    device = presence.homes[0].memory.device
    made = _make_buffers(model, device)
    with torch.no_grad(), presence.by_use(_abi.EDIT), _Draws(drawn, device) if drawn else contextlib.nullcontext():
        with _kept_away(model, ids):
            for module in _children_first(model, set()):
                inside = any(id(p) in ids for p in module.parameters()) or any(id(b) in made for b in module.buffers())
                for rule in _rules_of(module) if inside else ():
                    rule()
            for module in model.modules():
                if callable(getattr(module, "reset_lora_parameters", None)):  # peft's layers have rules of their own
                    for adapter in module.lora_A:  # type: ignore[union-attr]
                        module.reset_lora_parameters(adapter, True)  # type: ignore[operator]
        _take_back(unset, presence)
        for name, buffer in model.named_buffers():
            if name in stored:
                values = torch.empty(buffer.numel(), dtype=stored[name].dtype, device="cpu")
                stored[name].read(0, values)
                buffer.copy_(values.view(buffer.shape))
    with torch.no_grad(), presence.by_use(_abi.READ):
        _check_values(model, unset, made)
    _warn_of_constructors(model, ids)


class _Draws(Mode):
    """Lets parameters of other ranks, which are on the meta device, take the random numbers that they would take with memory."""

    def __init__(self, drawn: Iterable[torch.Tensor], device: torch.device) -> None:
        """device: whose random numbers they are."""
        super().__init__()
        self._device = device
        self._storages = {StorageWeakRef(p.untyped_storage()) for p in drawn}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(target, torch.Tensor) and target.is_meta:
            if StorageWeakRef(target.untyped_storage()) in self._storages:
                func(torch.empty_like(target, device=self._device), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _make_buffers(model: torch.nn.Module, device: torch.device) -> dict[int, torch.Tensor]:
    """Makes buffers without values in place of those on the meta device. Returns them by their ids."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if buffer.is_meta:
                fresh = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                if buffer.is_floating_point() or buffer.is_complex():
                    fresh.fill_(float("nan"))
                else:
                    _bytes(fresh).fill_(_UNSET)
                made[id(fresh)] = fresh
                setattr(module, name, fresh)
    return made


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


def _children_first(module: torch.nn.Module, seen: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The module and those inside it, children first. A model of transformers is one: it has an order of its own."""
    seen.add(module)
    if not _is_of_transformers(module):
        for child in module.children():
            if child not in seen:
                yield from _children_first(child, seen)
    yield module


def _rules_of(module: torch.nn.Module) -> list[_Rule]:
    """The rules for the first values of a module and those inside it, in their order."""
    if _is_of_transformers(module):
        return [lambda: _by_transformers(module)]
    rules: list[_Rule] = []
    for names in (("reset_parameters", "_reset_parameters"), ("init_weights", "_init_weights")):
        rule = next((rule for name in names if (rule := _rule(module, name)) is not None), None)
        if rule is not None:
            rules.append(rule)
    return rules


def _rule(module: torch.nn.Module, name: str) -> _Rule | None:
    """The method of that name as a rule: it takes nothing, or each module in turn, as Module.apply() calls it."""
    method = getattr(module, name, None)
    if not callable(method):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty and p.kind in kinds]
    if not needed:
        return method  # type: ignore[no-any-return]
    return (lambda: module.apply(method)) if len(needed) == 1 and name.endswith("init_weights") else None


def _is_of_transformers(module: torch.nn.Module) -> bool:
    return callable(getattr(module, "initialize_weights", None)) and callable(getattr(module, "tie_weights", None))


def _by_transformers(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p._is_hf_initialized = p.is_meta and not hasattr(p, DRAWN)  # type: ignore[attr-defined]
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()  # type: ignore[operator]
    model.tie_weights()  # type: ignore[operator]


@contextlib.contextmanager
def _kept_away(model: torch.nn.Module, ids: Container[int]) -> Iterator[None]:
    """Puts parameters on the meta device, where rules change nothing, in the place of all others."""
    places = places_of(model)
    kept = {id(p): p for p in model.parameters() if id(p) not in ids}
    try:
        for p in kept.values():
            replace(places, p, torch.empty_like(p, device="meta"))
        yield
    finally:
        for p in kept.values():
            put(places, p, p)


def _take_back(homes: Iterable[Home], presence: Presence) -> None:
    """Copies the values of parameters that a rule gave other memory back into the engine's."""
    for home in homes:
        if home.replaced and home.parameter.shape == home.memory.shape:
            values = home.parameter.detach()
            home.parameter.data = home.memory
            if presence.engine.gpu is not None:
                presence.conceal(home)
            home.parameter.copy_(values)


def _check_values(model: torch.nn.Module, unset: Iterable[Home], made: Mapping[int, torch.Tensor]) -> None:
    for home in unset:
        if bool(home.parameter.amax().isnan()):
            raise InvalidArgumentError(
                f"'{home.name}' was on the meta device, and no rule of the model (reset_parameters(), "
                "_init_weights(module)) gave all of it a value; let one do so, or build its module on the CPU"
            )
    for name, buffer in model.named_buffers():
        if id(buffer) in made and buffer.numel() and _is_unset(buffer):
            raise InvalidArgumentError(
                f"the buffer '{name}' was on the meta device, and nothing gave it a value; let reset_parameters() do so, or "
                "give it its values on the CPU (register_buffer(name, torch.arange(n, device='cpu'))), or build the model "
                "there, or with sluice.torch.from_pretrained()"
            )


def _is_unset(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(torch.isnan(buffer).any())
    return bool((_bytes(buffer) == _UNSET).all())


def _warn_of_constructors(model: torch.nn.Module, ids: Container[int]) -> None:
    unknown = {
        type(module).__name__: path
        for path, module in _without_rule(model, "")
        if type(module).__module__.split(".")[0] not in _KNOWN and any(id(p) in ids for p in module.parameters())
    }
    if unknown:
        names = ", ".join(f"{kind} ('{path}')" if path else kind for kind, path in list(unknown.items())[:4])
        warnings.warn(
            f"the first values in {names} are those of reset_parameters() of the layers inside: what a constructor does to "
            "parameters itself is not known of a model on the meta device. Where it does something, give the class an "
            "_init_weights(module) or reset_parameters() that does it, or build the model on the CPU",
            UserWarning,
            stacklevel=7,
        )
