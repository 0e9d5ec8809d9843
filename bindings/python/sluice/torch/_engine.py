"""A wrapped model's engine as users have it."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..device import predicted
from ..engine import Values
from ..errors import InvalidArgumentError, StateError
from ..model import Path
from . import _beside
from ._homes import ModelEngine
from ._measures import FirstStep, Ready
from ._presence import Presence


def _refused(call: str, remedy: str) -> Any:
    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise StateError(
            f"{call}() is called on the engine of a wrapped model, whose hooks and whose optimizer do that themselves; {remedy}"
        )

    return refuse


class WrappedEngine(ModelEngine):
    """A wrapped model's engine. A user may save, load and set values; calls for steps and units are refused, since the
    model's hooks and its optimizer make them."""

    first_step: FirstStep | None = None
    ready: Ready | None = None
    presence: weakref.ref[Presence] | None = None  # set once the model has moved in
    groups_of: Callable[[], _beside.Groups | None] = staticmethod(lambda: None)  # the optimizer, as long as it lives

    begin_step = _refused("begin_step", "a forward pass with gradients begins a step")
    step = _refused("step", "call step() of the optimizer that sluice.torch.wrap() gave")
    abandon_step = _refused("abandon_step", "optimizer.zero_grad() drops what the step has")
    end_micro_batch = _refused("end_micro_batch", "each backward() of a model that was wrapped with accumulate= ends one")
    end_gradients = _refused("end_gradients", "backward() of a model that was wrapped with accumulate= says so")
    acquire = _refused("acquire", "a unit is there when its module is called, and whenever a parameter is touched")
    add_gradient = _refused("add_gradient", "add to p.grad of the model's parameter")
    multiply_gradient = _refused("multiply_gradient", "multiply p.grad of the model's parameter (p.grad.mul_(factor))")
    drop_gradient = _refused("drop_gradient", "set p.grad of the model's parameter to None")
    replan = _refused("replan", "what PyTorch needs is found at each call of the model, or stated as wrap(reserve=...)")

    def plan(self) -> dict[str, Any]:
        """Engine's plan, with "pytorch": the bytes that PyTorch was estimated to take at once ("peak"), those that were
        planned for it ("reserve"), and those that the first step took ("measured"); None for what is not known. On a GPU
        also what was taken "beside" that and of the "host", and "seconds", by which the plan then says how long a step takes: the
        README of bindings/python says what they are. "ready" has the seconds in which the model was made ready, by phase."""
        computing = None if self.first_step is None else self.first_step.computing()
        made = super().plan() if computing is None else predicted(self, computing)
        if self.ready is not None:
            made["ready"] = dict(self.ready.seconds)
        return made if self.first_step is None else {**made, "pytorch": self.first_step.as_dict()}

    def close(self) -> None:
        """As ModelEngine's."""
        if self.presence is not None and (presence := self.presence()) is not None:
            presence.forget_held()
        super().close()

    def save(self, out: Path, keep: int = 0, files: Mapping[str, Sequence[Any]] | None = None) -> str:
        """Saves as Engine does, also after forward passes, with the model's buffers (those of its state_dict()) and the settings of
        the parameter groups. A warning names what of the model the checkpoint has not. Raises StateError where a step has gradients."""
        with self._turn() as presence:
            if presence is None or (model := presence.model()) is None:
                return super().save(out, keep, files)
            for name in {_beside.BUFFERS, _beside.GROUPS} & (files or {}).keys():
                raise InvalidArgumentError(f"'{name}' is a file of the checkpoint's own; give yours another name")
            presence.end_begun_step("saved")
            beside, lacking = _beside.files_of(model, self.groups_of())
            made = super().save(out, keep, {**(files or {}), **beside})
        if lacking:
            warnings.warn(f"the checkpoint '{made}' has not {', '.join(lacking)}; save that yourself", UserWarning, stacklevel=2)
        return made

    def load(self, path: Path) -> None:
        """Loads as Engine does, also after forward passes, whose graphs backward then refuses; and what save() has beside. A warning
        says so where the checkpoint has none of that. Raises StateError where a step has gradients."""
        with self._turn() as presence:
            if presence is None or (model := presence.model()) is None:
                return super().load(path)
            presence.end_begun_step("loaded")
            ranks, read = self.options.ranks, functools.partial(self._read_beside, path, model)
            folder, take = read() if ranks is None else ranks.agreed("what a checkpoint has beside", read)
            super().load(folder)
            presence.changed()
            take()

    def _read_beside(self, path: Path, model: torch.nn.Module) -> tuple[Path, Callable[[], object]]:
        """The checkpoint's folder, and a function that sets what it has beside values and state."""
        found = {name: self.checkpoint_file(path, name) for name in (_beside.BUFFERS, _beside.GROUPS)}
        if all(found.values()):
            return os.path.dirname(found[_beside.BUFFERS]), _beside.reader_of(model, self.groups_of(), found)
        warnings.warn(
            f"the checkpoint '{os.fspath(path)}' was not saved by a wrapped model: it has neither buffers nor the settings of "
            "parameter groups, which stay as they are",
            UserWarning,
            stacklevel=4,
        )
        return path, lambda: None

    def set_values(self, unit: str, values: Values) -> None:
        """Sets values as Engine does, also after forward passes, whose graphs backward then refuses."""
        with self._changing():
            super().set_values(unit, values)

    def load_values(self, path: Path) -> None:
        """Loads values as Engine does, also after forward passes, whose graphs backward then refuses."""
        with self._changing():
            super().load_values(path)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._turn() as presence:
            if presence is not None:
                presence.release_all()
            yield
            if presence is not None:
                presence.changed()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Presence | None]:
        """A `with` in which no other thread uses the model. Yields None where it is not wrapped."""
        presence = None if self.presence is None or self.closed else self.presence()
        with contextlib.nullcontext() if presence is None else presence.users:
            yield presence
