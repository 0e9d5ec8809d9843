"""Models that were built on the meta device: their parameters come to be in the engine, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._homes import Home

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


def initialise(model: torch.nn.Module, loaded: Container[int]) -> None:
    """First values for a model whose parameters were on the meta device and are in the engine now: by the model's own
    rules, module by module. loaded: ids of parameters that have their values; those keep them."""
    for p in model.parameters():
        p._is_hf_initialized = id(p) in loaded  # type: ignore[attr-defined]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unset(buffer)
    with torch.no_grad():
        if isinstance_of_transformers(model):
            model.initialize_weights()  # type: ignore[operator]
            model.tie_weights()  # type: ignore[operator]
        else:
            for module in model.modules():
                reset = _reset_of(module)
                if reset is not None and not any(id(p) in loaded for p in module.parameters(recurse=False)):
                    reset()
        for module in model.modules():
            if callable(getattr(module, "reset_lora_parameters", None)):  # peft's layers have rules of their own
                for adapter in module.lora_A:  # type: ignore[union-attr]
                    module.reset_lora_parameters(adapter, True)  # type: ignore[operator]
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            raise InvalidArgumentError(
                f"the buffer '{name}' was on the meta device, and nothing gave it a value; build the model on the CPU, or "
                "with sluice.torch.from_pretrained()"
            )


def take_back(homes: Iterable[Home]) -> None:
    """What initialise() gave other memory is the engine's again, with the values that it has there: transformers' tying
    pads a head's bias so, also where nothing is missing."""
    with torch.no_grad():
        for home in homes:
            if home.replaced and home.parameter.shape == home.memory.shape:
                home.memory.copy_(home.parameter)
                home.parameter.data = home.memory


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
