"""Parameters on the meta device, and those that replace them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Places = Mapping[int, list[tuple[torch.nn.Module, str]]]


def places_of(model: torch.nn.Module) -> Places:
    """By the id of each parameter, the modules that have it and its name there (several where it is tied)."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def replace(places: Places, parameter: torch.nn.Parameter, memory: torch.Tensor) -> torch.nn.Parameter:
    """Makes a parameter over `memory`, and replaces one on the meta device by it in all modules."""
    made = torch.nn.Parameter(memory, requires_grad=parameter.requires_grad)
    for module, name in places[id(parameter)]:
        module._parameters[name] = made
    return made


def carry_over(parameter: torch.nn.Parameter, made: torch.nn.Parameter) -> None:
    """Gives a parameter the class, attributes and hooks of the one on the meta device that it replaces. Hooks are shared,
    so that handles that remove them stay valid."""
    made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
