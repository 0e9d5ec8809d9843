"""Models that were built on the meta device: their parameters come to be in the engine, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError

Places = Mapping[int, list[tuple[torch.nn.Module, str]]]


def places_of(model: torch.nn.Module) -> Places:
    """id of a parameter -> the modules that have it, and its name there (several where it is tied)."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def replace(places: Places, parameter: torch.nn.Parameter, memory: torch.Tensor) -> torch.nn.Parameter:
    """A parameter over that memory, in all places of one on the meta device."""
    made = torch.nn.Parameter(memory, requires_grad=parameter.requires_grad)
    for module, name in places[id(parameter)]:
        module._parameters[name] = made
    return made


def check(model: torch.nn.Module) -> None:
    """Raises, naming it, where initialise() would find no way to give something a value."""
    if isinstance_of_transformers(model):
        return
    for path, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and t.is_meta for t in own) and _reset_of(module) is None:
            raise InvalidArgumentError(
                f"'{path}' ({type(module).__name__}) is on the meta device and has no reset_parameters(), which would give "
                "it its first values; add one, or build this module on the CPU"
            )


def initialise(model: torch.nn.Module, parameters: bool) -> None:
    """First values for a model whose parameters were on the meta device and are in the engine now: by the model's own
    rules, module by module. Without `parameters` only buffers get theirs."""
    if not parameters:
        for p in model.parameters():
            p._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unset(buffer)
    with torch.no_grad():
        if isinstance_of_transformers(model):
            model.initialize_weights()  # type: ignore[operator]
            model.tie_weights()  # type: ignore[operator]
        elif parameters:
            for module in model.modules():
                reset = _reset_of(module)
                if reset is not None:
                    reset()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            raise InvalidArgumentError(
                f"the buffer '{name}' was on the meta device, and nothing gave it a value; build the model on the CPU, or "
                "with sluice.torch.from_pretrained()"
            )


def isinstance_of_transformers(model: torch.nn.Module) -> bool:
    """Whether the model has the initialisation of transformers' models."""
    return callable(getattr(model, "initialize_weights", None)) and callable(getattr(model, "tie_weights", None))


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return made.fill_(float("nan")) if buffer.is_floating_point() else made


def _reset_of(module: torch.nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None
