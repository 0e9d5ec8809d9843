"""What brings a module's parameters in before its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from ..errors import StateError
from ._homes import Home
from ._units import has_children

if TYPE_CHECKING:
    from ._demand import Demand
    from ._saved import SavedTensors

_Hook = Callable[..., None]


def check_memory(home: Home) -> None:
    """Raises where somebody gave the parameter other memory."""
    if home.moved:
        raise StateError(
            f"'{home.name}' was moved into memory that processes share (by share_memory_(), or by sending it to another "
            "process), which the engine does not see: sluice.torch.close() the model, and wrap it again; send clone()s "
            "to other processes"
        )
    if home.replaced:
        raise StateError(
            f"'{home.name}' was given other memory (by .data = ..., or set_()), which the engine does not see; "
            "copy_() into it instead"
        )


def _check_place(home: Home, found: torch.Tensor | None) -> None:
    if found is None or (isinstance(found, torch.nn.Parameter) and found is not home.parameter):
        raise StateError(
            f"'{home.name}' is no more where it was when the model was wrapped: its module has "
            f"{'none' if found is None else 'another Parameter'} there, which would not be trained; copy_() into it "
            "instead, or sluice.torch.close() the model before, and wrap it again. (torch.func.functional_call() may be "
            "given tensors, such as parameters' detach(); torch.export() needs a closed model)"
        )


def check_places(model: torch.nn.Module, homes: Sequence[Home]) -> None:
    """Raises where one of these is no more a parameter of the model."""
    here = dict(model.named_parameters())
    known = {id(p) for p in here.values()}
    for home in homes:
        if id(home.parameter) not in known:
            _check_place(home, here.get(home.name))


class _Acquire:
    """The hooks of one module. Children that it uses without calling them, as nn.MultiheadAttention does its out_proj, are
    found in its first forward, by the touch that they cost, and brought in with it from then on."""

    def __init__(
        self,
        use: Callable[[int], None],
        touches: Callable[[], int],
        saved: SavedTensors,
        demand: Demand,
        own: Mapping[str, Home],
    ) -> None:
        """own: by the names that the module has for them."""
        self.use, self.touches, self.saved, self.demand, self.own = use, touches, saved, demand, own
        self.homes = list(own.values())
        self.units = sorted({unit for home in self.homes for unit in home.units})
        self.children: list[_Acquire] = []
        self.called = False
        self.touched = 0
        self.covered = False  # in graphs of torch.compile(): what they are part of has brought it in

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.demand.estimating:
            return
        self.demand.begin(module, args, kwargs)
        if not self.called:
            self.called, self.touched = True, self.touches()
        for name, home in self.own.items():
            _check_place(home, module._parameters.get(name))
        for home in self.homes:
            check_memory(home)
        for unit in self.units:
            self.use(unit)
        self.saved.begin_module(module)

    def ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Also after an exception."""
        if not self.demand.estimating:
            self.saved.end_module(module)
            self.demand.end(module, output)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self.children or self.demand.estimating:
            return
        if self.touches() != self.touched:
            for child in self.children:
                if not child.called:
                    self.homes += child.homes
            self.units = sorted({unit for home in self.homes for unit in home.units})
        self.children = []


def outside_of_graphs(hook: _Hook) -> _Hook:
    """The hook, which graphs of torch.compile() break at."""
    made: _Hook = torch.compiler.disable(
        hook,
        reason="the parameters of a wrapped model come and go between operations, so it is no whole graph; compile its "
        "blocks instead, before sluice.torch.wrap() (model.blocks[i] = torch.compile(model.blocks[i])), or the model "
        "without fullgraph=True",
    )
    return made


def _hook(acquire: _Acquire, hook: _Hook) -> _Hook:
    alone = outside_of_graphs(hook)
    if not acquire.covered:
        return alone

    def run(*given: Any) -> None:
        if not torch.compiler.is_compiling():
            alone(*given)

    return run


def _cover_compiled(made: Mapping[torch.nn.Module, _Acquire], limit: int) -> None:
    """What torch.compile() made of a block brings in all of it, where that can be held at once."""
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
    model: torch.nn.Module,
    homes: Mapping[int, Home],
    use: Callable[[int], None],
    touches: Callable[[], int],
    saved: SavedTensors,
    demand: Demand,
    limit: int,
) -> list[Any]:
    """Hooks for all modules of a model; gives what removes them. homes: by the parameter's id. touches: how many there
    were. limit: of units that are held at once."""
    made = {
        module: _Acquire(
            use,
            touches,
            saved,
            demand,
            {name: homes[id(p)] for name, p in module.named_parameters(recurse=False) if id(p) in homes},
        )
        for module in model.modules()
    }
    _cover_compiled(made, limit)
    hooks: list[Any] = []
    for module, acquire in made.items():
        children = [made[child] for child in module.children() if not has_children(child)]
        acquire.children = [child for child in children if child.homes]
        if acquire.homes or acquire.children:
            hooks.append(module.register_forward_pre_hook(_hook(acquire, acquire.before), with_kwargs=True))
            hooks.append(module.register_forward_hook(_hook(acquire, acquire.ended), always_call=True))
        if acquire.children:
            hooks.append(module.register_forward_hook(_hook(acquire, acquire.after)))
    return hooks
