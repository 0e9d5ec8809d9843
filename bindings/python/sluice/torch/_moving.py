"""Moves a model's parameters into an engine, and back where wrapping fails."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
import torch

from ..errors import Error
from ..model import Unit
from . import _homes, _meta
from ._homes import Home, Span
from ._units import Group

Source = Callable[[str, int, memoryview], object]
"""Fills in a run of a parameter's elements: its name, the first element, and the memory."""


class Moving:
    """Gives each unit its values, and then its parameters the engine's memory, which frees their own. undo() brings all
    of them back, wherever moving stopped."""

    def __init__(self, model: torch.nn.Module, engine: _homes.ModelEngine) -> None:
        self._engine = engine
        self._device = "cpu" if engine.gpu is None else engine.gpu.device
        self._places = _meta.places_of(model)
        self._homes: list[Home] = []
        self._were: dict[int, torch.device] = {}  # where each home's parameter was
        self._on_meta: dict[int, torch.nn.Parameter] = {}  # the parameters that homes' parameters replaced, by home
        self._empty = [p for p in model.parameters() if p.is_meta and not p.numel()]
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (buffer.is_meta or buffer.device.type != torch.device(self._device).type)
        ]

    def move_in(self, groups: Sequence[Group], train: bool, source: Source | None) -> list[Home]:
        """Moves all parameters. Returns their homes."""
        index, spans = 0, []
        for u, group in enumerate(groups):
            unit = self._engine.units[u]
            self._set_values(unit, group, source)
            for declared, (name, given) in zip(unit.parameters, group.parameters, strict=True):
                spans.append(Span(index, declared.key, u, declared.first, declared.elements))
                index += 1
                if not group.ends_parameters:
                    continue
                self._were[len(self._homes)] = given.device
                p = self._into_engine(given, spans)
                trainable = train and p.requires_grad
                home = Home(name, len(self._homes), spans, p, p.data, trainable, declared.by_elements)
                if given.is_meta:
                    self._on_meta[home.index] = given
                self._homes.append(home)
                spans = []
            if self._engine.gpu is not None:
                self._engine.gpu.give_back()
        self._move_buffers()
        for p in self._empty:
            _meta.carry_over(p, _meta.replace(self._places, p, torch.empty(p.shape, dtype=p.dtype, device=self._device)))
        gc.collect()
        return self._homes

    def _move_buffers(self) -> None:
        """Moves buffers to the GPU with the parameters; one that several modules have stays one."""
        moved: dict[int, torch.Tensor] = {}
        for module, name, buffer in self._buffers:
            if not buffer.is_meta:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(self._device))

    def _set_values(self, unit: Unit, group: Group, source: Source | None) -> None:
        declared = {p.key: (p, given) for p, (_, given) in zip(unit.parameters, group.parameters, strict=True)}
        if source is not None:
            self._engine.set_values(
                unit.name, lambda key, at, part: source(declared[key][0].name, declared[key][0].first + at, part)
            )
            return
        floats = {key: _homes.floats_of(given, p) for key, (p, given) in declared.items() if not given.is_meta}

        def fill(key: str, at: int, part: memoryview) -> None:
            run = torch.frombuffer(part, dtype=torch.float32)
            if key in floats:
                run.copy_(floats[key][at : at + len(run)])
            else:
                run.fill_(math.nan)  # no value, until a rule of the model gives one

        self._engine.set_values(unit.name, fill)

    def _into_engine(self, given: torch.nn.Parameter, spans: Sequence[Span]) -> torch.nn.Parameter:
        memory = self._engine.tensor(spans, tuple(given.shape), given.dtype)
        if given.is_meta:
            made = _meta.replace(self._places, given, memory)
            _meta.carry_over(given, made)
            return made
        given.data = memory
        return given

    def undo(self) -> list[str]:
        """Gives the model parameters of its own again, with the engine's values or on the meta device as before, and closes
        the engine. Returns the names of those whose values the engine has lost, which are on the meta device then."""
        values = self._values()
        lost = []
        for home in self._homes:
            home.parameter.__dict__.pop("_sluice", None)
            home.let_go()
            if home.index in self._on_meta:
                self._put(self._on_meta[home.index])
            elif home.index in values:
                home.parameter.data = values[home.index]
            else:
                lost.append(home.name)
                _meta.replace(self._places, home.parameter, torch.empty_like(home.parameter, device="meta"))
        for p in self._empty:
            self._put(p)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        self._engine.close()
        return lost

    def _put(self, parameter: torch.nn.Parameter) -> None:
        for module, name in self._places[id(parameter)]:
            module._parameters[name] = parameter

    def _values(self) -> dict[int, torch.Tensor]:
        """The values of parameters that had some before, by their homes' indices, as far as the engine still has them."""
        wanted = [home for home in self._homes if home.index not in self._on_meta]
        values = {
            home.index: torch.empty_like(
                home.memory, memory_format=torch.contiguous_format, device=self._were[home.index]
            )
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
