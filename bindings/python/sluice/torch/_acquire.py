"""The hooks that bring a module's parameters in before its forward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo
from torch.utils.hooks import RemovableHandle

from ._demand import Demand
from ._homes import Home
from ._presence import Presence
from ._saved import SavedTensors
from ._modes import Hook, outside_of_graphs
from ._units import has_children


class _Acquire:
    """The hooks of one module. A child that the module uses without calling it (nn.MultiheadAttention does so with its
    out_proj) costs a touch in the first forward pass, and from then on comes in with the module."""

    def __init__(
        self, presence: Presence, saved: SavedTensors, demand: Demand, own: Mapping[str, Home]
    ) -> None:
        """own: the module's own parameters, by the module's names for them."""
        self.presence, self.saved, self.demand, self.own = presence, saved, demand, own
        self.homes = list(own.values())
        self.units = sorted({unit for home in self.homes for unit in home.units})
        self.children: list[_Acquire] = []
        self.called = False
        self.touched = 0
        self.covered = False  # it is part of a graph of torch.compile(), whose hooks bring it in

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.demand.estimating:
            return
        self.demand.begin(module, args, kwargs)
        if not self.called:
            self.called, self.touched = True, self.presence.touches()
        for name, home in self.own.items():
            home.check_place(module._parameters.get(name))
        for unit in self.units:
            self.presence.use(unit)
        for home in self.homes:
            home.check_memory()
        self.saved.begin_module(module)

    def ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The module's call has ended, with this output, or with an exception."""
        if not self.demand.estimating:
            self.saved.end_module(module)
            self.demand.end(module, output)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self.children or self.demand.estimating:
            return
        if self.presence.touches() != self.touched:
            for child in self.children:
                if not child.called:
                    self.homes += child.homes
            self.units = sorted({unit for home in self.homes for unit in home.units})
        self.children = []


def _hook(acquire: _Acquire, hook: Hook) -> Hook:
    alone = outside_of_graphs(hook)
    if not acquire.covered:
        return alone

    def run(*given: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            alone(*given)

    return run


def _key_alike(handle: RemovableHandle, key: int) -> None:
    """Gives a hook a key that is the same in all modules, and no number of PyTorch's. These differ from module to module, so that no
    block could use the graph of another, and after eight graphs of one function torch.compile() makes no more. It keeps its place."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            is_first = next(iter(hooks)) == handle.id
            hooks[key] = hooks.pop(handle.id)
            if is_first and isinstance(hooks, OrderedDict):
                hooks.move_to_end(key, last=False)
    handle.id = key


def _cover_compiled(made: Mapping[torch.nn.Module, _Acquire], limit: int) -> None:
    """Lets a compiled block bring in all of its units, where they can be held at once."""
    for module, acquire in made.items():
        if not isinstance(module, torch._dynamo.OptimizedModule):
            continue
        inside = [made[inner] for inner in module._orig_mod.modules()]
        homes = [home for each in inside for home in each.homes]
        units = sorted({unit for home in homes for unit in home.units})
        if len(units) <= limit:
            acquire.homes, acquire.units = homes, units
            for each in inside:
                each.covered = True


def install(
    model: torch.nn.Module, presence: Presence, saved: SavedTensors, demand: Demand
) -> list[Any]:
    """Installs the hooks of all modules of a model. Returns what removes them."""
    homes, made = presence.by_id, {}
    for module in model.modules():
        own = {name: homes[id(p)] for name, p in module.named_parameters(recurse=False) if id(p) in homes}
        made[module] = _Acquire(presence, saved, demand, own)
    _cover_compiled(made, presence.limit)
    hooks: list[Any] = []

    def keep(handle: RemovableHandle, number: int) -> None:
        _key_alike(handle, -1 - number)
        hooks.append(handle)

    for module, acquire in made.items():
        children = [made[child] for child in module.children() if not has_children(child)]
        acquire.children = [child for child in children if child.homes]
        if acquire.homes or acquire.children:
            keep(module.register_forward_pre_hook(_hook(acquire, acquire.before), prepend=True, with_kwargs=True), 0)
            keep(module.register_forward_hook(_hook(acquire, acquire.ended), always_call=True), 1)
        if acquire.children:
            keep(module.register_forward_hook(_hook(acquire, acquire.after)), 2)
    return hooks
