"""Finds the settings of each parameter of a wrapped model, and the parameters that Muon leaves to AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..optimizers import Muon
from ..optimizers import Optimizer as Settings
from ._units import Roles


def roles_of(
    model: torch.nn.Module, optimizer: Settings, param_groups: Sequence[Mapping[str, Any]]
) -> tuple[list[Settings], Roles]:
    """The settings of each group (the first is for parameters without a group), and the parameters' roles."""
    settings, roles = [optimizer], Roles()
    known = {id(p): p for p in model.parameters()}
    roles.position = {key: position for position, key in enumerate(known)}
    if isinstance(optimizer, Muon):
        roles.by_elements = _tables(model)
    for given in param_groups:
        if not isinstance(given, Mapping) or "params" not in given:
            raise InvalidArgumentError(
                f"a parameter group is {given!r:.80}; a dict is needed, with 'params': parameters or their names"
            )
        allowed = ["params", *optimizer.of_step] + (["use_muon"] if isinstance(optimizer, Muon) else [])
        other = set(given) - set(allowed)
        if other:
            raise InvalidArgumentError(f"a parameter group has {sorted(other)}; it may have {', '.join(allowed)}")
        settings.append(changed(optimizer, {name: given[name] for name in optimizer.of_step if name in given}))
        for position, key in enumerate(_members(model, known, given["params"])):
            if key in roles.group:
                raise InvalidArgumentError("a parameter is in two parameter groups; leave it in one")
            roles.group[key] = len(settings) - 1
            roles.position[key] = position
            if "use_muon" in given:
                _choose(roles, known[key], given["use_muon"])
    if vars(optimizer).get("adamw_lr") is not None:
        stated = [False] + ["lr" in given for given in param_groups]
        settings = _split(settings, stated, roles, list(known.values()), vars(optimizer)["adamw_lr"])
    return settings, roles


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with other values, which may be lists and tensors, as in torch.optim. Raises InvalidArgumentError where
    one is out of its range, or cannot change."""
    made: Settings = settings.replaced(**{name: _plain(value) for name, value in values.items()})
    for name in settings.fixed:
        if getattr(made, name) != getattr(settings, name):
            raise InvalidArgumentError(
                f"{name} is {getattr(made, name)}, and the model was wrapped with {getattr(settings, name)}; it cannot "
                f"change. {settings.may_change} can"
            )
    if made.has_momentum != settings.has_momentum:
        raise InvalidArgumentError(
            f"the {settings.name} optimizer is {'given' if made.has_momentum else 'left without'} momentum, and the model was "
            f"wrapped {'with' if settings.has_momentum else 'without'}; its array is in the plan, or is not: wrap the model "
            "with the momentum that it begins with"
        )
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(_plain(each) for each in value) if isinstance(value, (list, tuple)) else value


def _members(model: torch.nn.Module, known: Mapping[int, torch.nn.Parameter], members: Any) -> list[int]:
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter has several
    found = []
    for member in [members] if isinstance(members, (str, torch.Tensor)) else members:
        p = names.get(member) if isinstance(member, str) else member
        if p is None or id(p) not in known:
            raise InvalidArgumentError(f"a parameter group has {member!r:.80}, which is no parameter of the model")
        found.append(id(p))
    return found


def _choose(roles: Roles, p: torch.nn.Parameter, use_muon: bool) -> None:
    if use_muon and p.dim() != 2:
        raise InvalidArgumentError(
            f"a parameter of the shape {tuple(p.shape)} is in a group with use_muon, which is for matrices; give it a group "
            "without"
        )
    if use_muon:
        roles.by_elements.discard(id(p))
    else:
        roles.by_elements.add(id(p))


def _tables(model: torch.nn.Module) -> set[int]:
    """Embeddings, and the output head where the model names it: their rows stand for tokens."""
    modules: list[Any] = [m for m in model.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    if callable(head := getattr(model, "get_output_embeddings", None)):
        modules.append(head())
    return {id(m.weight) for m in modules if isinstance(getattr(m, "weight", None), torch.nn.Parameter)}


def _split(
    settings: list[Settings], stated: Sequence[bool], roles: Roles, parameters: Sequence[torch.nn.Parameter], lr: float
) -> list[Settings]:
    """Gives AdamW's parameters groups of their own with its learning rate, unless their group states one."""
    split: list[Settings] = [group.replaced(adamw_lr=None) for group in settings]
    of_group: dict[int, int] = {}
    for p in parameters:
        group = roles.group.get(id(p), 0)
        if stated[group] or (p.dim() == 2 and id(p) not in roles.by_elements):
            continue
        if group not in of_group:
            of_group[group] = len(split)
            split.append(split[group].replaced(lr=lr))
        roles.group[id(p)] = of_group[group]
    return split
