"""Which units are on the GPU: those of the calls of modules that go on, and of their backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import _abi
from ..errors import StateError
from ._fakes import tensors_in
from ._homes import Home
from ._modes import outside_of_graphs
from ._presence import Presence
from ._units import owners_around


class Owner(NamedTuple):
    """What belongs to a module."""

    name: str  # the module's, by which messages and other owners know it
    units: Mapping[int, int]  # the unit's access, as use_together() takes it
    homes: Sequence[Home]
    around: Collection[str]  # the names of owners that the module is in


class Call(NamedTuple):
    """A call of a module that units belong to."""

    name: str  # the module's
    units: Mapping[int, int]  # with those of the calls that it is in
    outer: Call | None
    before: Call | None  # what was there before it, and is after it


class Calls:
    """Which units of one wrapped model are on the GPU: those of the calls that have not ended; in a backward pass, of the call whose
    backward is computed, with the calls that it was in. A pass computes what calls have computed in the opposite order, so that one
    call's backward ends before that of the call before it begins. It refers to no module: parameters refer to it, and Python's
    collector does not look into all of them."""

    def __init__(self, presence: Presence, is_estimating: Callable[[], bool]) -> None:
        self._presence, self._is_estimating = presence, is_estimating
        self._now: Call | None = None
        self._enter, self._leave = outside_of_graphs(self.enter), outside_of_graphs(self.leave)

    def install(self, model: torch.nn.Module, owners: Mapping[torch.nn.Module, Sequence[int]]) -> Owner:
        """Lets calls of modules bring in what belongs to them. Returns what belongs to the model itself."""
        presence = self._presence
        presence.belongs_to = [""] * len(presence.engine.units)
        names = {module: f"'{name}'" if name else "the model" for name, module in model.named_modules()}
        of_model = Owner(names[model], {}, (), ())
        homes_of: dict[int, list[Home]] = {}  # by unit
        for home in presence.homes:
            for unit in home.units:
                homes_of.setdefault(unit, []).append(home)
        outside = owners_around(owners)
        for module, units in owners.items():
            homes = [home for unit in units for home in homes_of.get(unit, ())]
            around = [names[outer] for outer in outside[module]]
            owner = Owner(names[module], dict.fromkeys(units, _abi.READ), homes, around)
            for unit in units:
                presence.belongs_to[unit] = f"{names[module]} ({type(module).__name__})"
            if module is model:
                of_model = owner
                continue
            module.__dict__["_call_impl"] = functools.partial(self._call, owner, functools.partial(type(module)._call_impl, module))
            if module._compiled_call_impl is not None:
                module._compiled_call_impl = functools.partial(self._call, owner, module._compiled_call_impl)
        return of_model

    def _call(self, owner: Owner, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces Module._call_impl and what Module.compile() makes of it, which is `run`."""
        if self._is_estimating():
            return run(*args, **kwargs)
        output, call = None, self._enter(owner)
        try:
            output = run(*args, **kwargs)
            return output
        finally:
            self._leave(call, output)

    def enter(self, owner: Owner) -> Call:
        """A call begins of the module to which this belongs."""
        presence, outer = self._presence, self._now
        presence.check_open()
        _refuse_transforms()
        presence.users.__enter__()
        try:
            in_pass = self.begin_pass()
            if presence.full:
                raise StateError(
                    "a wrapped model is called within `with sluice.torch.full_parameters()`, where its parameters are on the CPU; call it "
                    "after that"
                )
            presence.check_unwritten(owner.homes)
            around = outer
            while in_pass and around is not None and around.name not in owner.around:
                around = around.outer  # a checkpoint computes a call again that was before or after that one
            call = Call(owner.name, owner.units if around is None else {**around.units, **owner.units}, around, outer)
            self._go(call)
        except BaseException:
            self.leave(Call("", {}, None, outer), None)
            raise
        return call

    def leave(self, call: Call, output: Any) -> None:
        """That call has ended with this output, or with None after an exception."""
        try:
            for tensor in [] if output is None else tensors_in([[output]]):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(functools.partial(self._begin_backward, call))
            self._go(call.before)
        finally:
            self._presence.users.__exit__()

    def begin_pass(self) -> bool:
        """Comes in a backward pass, before it uses the model. After it what was there before is there. Returns whether this is in one."""
        before = self._now
        return self._presence.users.begin_pass(lambda: self._go(before))

    def _begin_backward(self, call: Call, gradient: torch.Tensor) -> None:
        self._presence.check_open()
        self.begin_pass()
        if torch.is_grad_enabled():
            raise StateError(
                "a backward pass of a model that is wrapped on a GPU makes a graph (create_graph=True), whose own backward would not "
                "find the parameters; wrap the model on the CPU for that"
            )
        self._go(call)

    def _go(self, call: Call | None) -> None:
        self._now, self._presence.in_call = call, call is not None
        if not self._presence.engine.closed:
            self._presence.show({} if call is None else call.units)


def _refuse_transforms() -> None:
    """Raises StateError where memory would be shown to parameters as tensors of a transform, which end with it."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise StateError(
            "a model that is wrapped on a GPU is called within a transform of torch.func (grad, vmap, jvp, ...), in which its parameters "
            "cannot come and go; use torch.autograd.grad(), or wrap the model on the CPU"
        )
