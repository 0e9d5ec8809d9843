"""Finds the parameter groups of a wrapped model, and the parameters that Muon leaves to AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..optimizers import Muon
from ..optimizers import Optimizer as Settings
from ._units import Roles

_OF_OTHERS = ("amsgrad", "maximize", "momentum", "dampening", "nesterov", "centered", "decoupled_weight_decay")


def roles_of(model: torch.nn.Module, optimizer: Settings, param_groups: Iterable[Any]) -> tuple[list[Settings], Roles]:
    """The settings of each group, and the parameters' roles. Groups are those that are given, in their order, and then one of all
    other parameters, where any of these is trained or no group is given."""
    roles, parameters = Roles(), dict(model.named_parameters())
    known = {id(p): p for p in parameters.values()}
    if isinstance(optimizer, Muon):
        roles.by_elements = _tables(model)
    groups, names = _dicts(param_groups), {}
    for number, given in enumerate(groups):
        for key, name in _members(model, known, given["params"]):
            if key in roles.group:
                raise InvalidArgumentError("a parameter is in two parameter groups; leave it in one")
            roles.group[key] = number
            if name is not None:
                names[key] = name
            if "use_muon" in given:
                _choose(optimizer, roles, known[key], given["use_muon"])
    others = [key for key in known if key not in roles.group]
    if not groups or any(known[key].requires_grad for key in others):
        groups.append({"params": []})
        roles.group.update(dict.fromkeys(others, len(groups) - 1))
    settings = [settings_of_group(given, optimizer) for given in groups]
    roles.keys = [{name: value for name, value in given.items() if name != "params"} for given in groups]
    if vars(optimizer).get("adamw_lr") is not None:
        _split(settings, roles, known, vars(optimizer)["adamw_lr"])
    first = {id(p): name for name, p in parameters.items()}
    for number, keys in enumerate(roles.keys):
        members = [key for key, group in roles.group.items() if group == number]
        roles.members.append([first[key] for key in members])
        if names:
            keys["param_names"] = [names.get(key, first[key]) for key in members]
    return settings, roles


def _dicts(param_groups: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Parameter groups as torch.optim takes them: dicts, or the parameters of one group, with their names or without."""
    given = list(param_groups)
    if given and all(isinstance(each, (torch.Tensor, tuple)) for each in given):
        given = [{"params": given}]
    for group in given:
        if not isinstance(group, Mapping) or "params" not in group:
            raise InvalidArgumentError(
                f"a parameter group is {group!r:.80}; a dict is needed, with 'params': parameters or their names"
            )
    return given


def settings_of_group(group: Mapping[str, Any], made_with: Settings) -> Settings:
    """The settings that a group states, which may be lists and tensors, as in torch.optim; its other keys are the user's own. Raises
    InvalidArgumentError where one is not valid, cannot change, or is a setting that this optimizer does not have."""
    had = vars(made_with)
    for name, always in {**dict.fromkeys(_OF_OTHERS, False), **made_with.implied}.items():
        if name not in had and group.get(name) is not None and _plain(group[name]) != always:
            raise InvalidArgumentError(
                f"{name} is {group[name]}, which the wrapped model's optimizer does not have: to {type(made_with).__name__} it is always "
                f"{always}; leave it out"
            )
    made: Settings = made_with.replaced(**{name: _plain(value) for name, value in group.items() if name in had})
    for name in made_with.fixed:
        if getattr(made, name) != getattr(made_with, name):
            raise InvalidArgumentError(
                f"{name} is {getattr(made, name)}, and the model was wrapped with {getattr(made_with, name)}; it cannot "
                f"change. {made_with.may_change} can"
            )
    if made.has_momentum != made_with.has_momentum:
        raise InvalidArgumentError(
            f"the {made.name} optimizer is {'given' if made.has_momentum else 'left without'} momentum, and the model was "
            f"wrapped {'with' if made_with.has_momentum else 'without'}; its array is in the plan, or is not: wrap the model "
            "with the momentum that it begins with"
        )
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(_plain(each) for each in value) if isinstance(value, (list, tuple)) else value


def _members(
    model: torch.nn.Module, known: Mapping[int, torch.nn.Parameter], members: Any
) -> list[tuple[int, str | None]]:
    """The ids of a group's parameters, with the names that come with them, as from named_parameters()."""
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter has several
    found = []
    for member in [members] if isinstance(members, (str, torch.Tensor)) else members:
        name, given = member if isinstance(member, tuple) and len(member) == 2 else (None, member)
        p = names.get(given) if isinstance(given, str) else given
        if p is None or id(p) not in known:
            raise InvalidArgumentError(f"a parameter group has {member!r:.80}, which is no parameter of the model")
        found.append((id(p), name))
    return found


def _choose(optimizer: Settings, roles: Roles, p: torch.nn.Parameter, use_muon: bool) -> None:
    if not isinstance(optimizer, Muon):
        if use_muon:
            raise InvalidArgumentError(f"a parameter group has use_muon, and the optimizer is {optimizer}; give sluice.Muon()")
        return
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


def _split(settings: list[Settings], roles: Roles, known: Mapping[int, torch.nn.Parameter], lr: float) -> None:
    """Gives AdamW's parameters this learning rate, unless their group states one. Where Muon's are in the same group, they get
    one of their own, after all others."""
    for number in range(len(settings)):
        settings[number] = settings[number].replaced(adamw_lr=None)
        members = [key for key, group in roles.group.items() if group == number]
        adamws = [key for key in members if known[key].dim() != 2 or key in roles.by_elements]
        if "lr" in roles.keys[number] or not adamws:
            continue
        if adamws == members:
            settings[number] = settings[number].replaced(lr=lr)
            continue
        roles.group.update(dict.fromkeys(adamws, len(settings)))
        settings.append(settings[number].replaced(lr=lr))
        roles.keys.append(dict(roles.keys[number]))
