"""Moves a model's parameters into an engine, and back where wrapping fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ..errors import Error
from ..model import Unit
from ._homes import Home, ModelEngine, Span
from ._safetensors import InFiles
from ._units import Group

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
        module._parameters[name] = instead


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
        self._device = torch.device("cpu") if engine.gpu is None else engine.gpu.device
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
