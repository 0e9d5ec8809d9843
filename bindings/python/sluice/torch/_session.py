"""A wrapped model: its parameters move into the engine, and are present when autograd needs them."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .. import _abi
from ..errors import BudgetError, StateError
from ..optimizers import Optimizer as Settings
from . import _full, _homes, _reproducible
from ._calls import Calls
from ._demand import Demand
from ._engine import ModelEngine
from ._gradients import Arrived, Gradient, Gradients
from ._guards import guard, keep_touches_served, override, refuse_copy, restore
from ._homes import Home
from ._measures import Keeper, Ready
from ._moving import Moving, places_of, replace
from ._prepare import Prepared
from ._presence import Presence
from ._safetensors import InFiles
from ._modes import outside_of_graphs
from ._together import Together
from ._units import owners_of


_engines: weakref.WeakSet[ModelEngine] = weakref.WeakSet()  # of this process


class Session:
    """One wrapped model, from wrap() to close()."""

    def __init__(
        self, model: torch.nn.Module, prepared: Prepared, together: Together, stored: Mapping[str, InFiles], ready: Ready
    ) -> None:
        """stored: where values lie that are in files, by names; the others are the model's own."""
        options, train = prepared.options, prepared.train
        trainable = train and any(p.requires_grad for p in model.parameters())
        largest = max((p.numel() * p.element_size() for p in model.parameters() if p.requires_grad), default=0)
        keeper = Keeper(prepared.memory, largest)
        self.model = weakref.ref(model)
        self._hooks: list[Any] = []
        self._together = together
        several = together.ranks is not None
        # Whether the ends of backward passes end micro-batches.
        self._counts = prepared.counts_passes and (options.reproducible or (several and options.micro_batches > 0))
        owners = {} if prepared.gpu is None else owners_of(model, prepared.groups)  # parameters on the meta device will be others
        with ready.phase("engine"):
            self.engine = _engine_for(model, prepared)
        _engines.add(self.engine)
        self.engine.ready = ready
        self._moving: Moving | None = Moving(model, self.engine)
        with self.undone_on_failure():
            plan = self.engine.plan()
            self._of_pytorch = prepared.of_pytorch(plan)
            self._sums_in_backward = plan.get("sums_in_backward", False)
            if prepared.gpu is not None:
                prepared.gpu.check_room(model, self._of_pytorch, self.engine.account())
            self.engine.first_step = prepared.first_step(self.engine, plan)
            with ready.phase("values"):
                together.share_values(model)  # engines have compared the parameters
                homes = self._moving.move_in(prepared.groups, train, stored)
            self.presence = Presence(
                self.model, self.engine, homes, keeper, self.engine.first_step, trainable, prepared.clip_value
            )
            self.presence.gradients, self._arrived = Gradients(self.presence), Arrived(self.presence)
            if several or self._counts:  # otherwise nothing depends on when a pass begins and ends
                self.presence.users.watch(self._arrived.begin_pass, self.end_backward, self._counts)
            stated = prepared.stated or prepared.gpu is not None
            self.demand = Demand(self.presence, stated, prepared.estimated is not None, self._of_pytorch)
            self._calls = Calls(self.presence, self.demand)
            self._install(model, owners)
            guard(model, {home.memory.dtype for home in homes}, homes[0].memory.device)
            if prepared.gpu is None:
                keep_touches_served()
            if together.ranks is not None and not hasattr(model, "no_sync"):
                override(model, "no_sync", contextlib.nullcontext)  # for scripts that know DDP; which pass is the last is counted
            for home in homes if prepared.gpu is not None else ():
                self.presence.conceal(home)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("copied or pickled, in whole or in part")

    @property
    def size(self) -> int:
        """How many ranks train the model together."""
        return self._together.size

    # ---- moving in and out ----

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """After a failure inside of the `with`, before moved_in(), the model is as it was before it was wrapped."""
        assert self._moving is not None, "the model has moved in"
        try:
            yield
        except BaseException as error:
            self._uninstall()
            if lost := self._moving.undo():
                raise StateError(
                    f"wrapping the model failed ({error}), and the engine cannot give back the values of "
                    f"{', '.join(repr(name) for name in lost)}; they are on the meta device now: build or load the model "
                    "again"
                ) from error
            raise

    def moved_in(self) -> None:
        """Ends moving in, which can then not be undone any more."""
        presence = self.presence
        self._moving = None
        if len(_engines) > 1:
            gc.collect()  # a model that was dropped has its memory until then, and would make what PyTorch takes seem less
        presence.keeper.give_back()
        if (gpu := self.engine.gpu) is not None:
            gpu.give_back()
            gpu.bound(self._of_pytorch)
            self._unbind = weakref.finalize(self, gpu.unbound, self._of_pytorch)
            self._unbind.atexit = False
        presence.first_step.begin()
        presence.first_step.planned(self.engine.plan())
        self.engine.presence = weakref.ref(presence)

    def close(self, values: bool) -> None:
        """Closes the engine, and leaves the parameters plain tensors, with their values or on the meta device. The gradients that the
        engine has end with it."""
        if self.engine.closed:
            return
        presence = self.presence
        with presence.users, presence.lock:
            on_gpu = presence.engine.gpu is not None
            (_without_values if not values else _with_values_of_gpu if on_gpu else _with_values)(presence)
            presence.forget_held()
            self.engine.left = True  # comes first, since another thread may be about to use the model
            for home in presence.homes:
                if isinstance(home.parameter.grad, Gradient):
                    home.parameter.grad = None
                del home.parameter._sluice  # type: ignore[attr-defined]
                home.let_go()  # only the parameter may keep the memory
            if self.engine.gpu is not None:
                self.engine.end_on_gpu()
                self._unbind()
            self._uninstall()
        self._together.close()

    def _uninstall(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if (model := self.model()) is not None:
            restore(model)

    # ---- hooks ----

    def _install(self, model: torch.nn.Module, owners: Mapping[torch.nn.Module, Sequence[int]]) -> None:
        self._calls.install(model, owners)
        _full.install(model, self.presence)
        if self.engine.options.reproducible:
            self._hooks += _reproducible.watch(model, lambda: self.demand.estimating)
        for home in self.presence.homes:
            home.parameter._sluice = self  # type: ignore[attr-defined]
            if home.trainable:
                # Python's collector does not see such hooks: with a reference in one the session would never end.
                before = outside_of_graphs(functools.partial(_before_gradient, weakref.ref(self)))
                hook = outside_of_graphs(functools.partial(_on_gradient, weakref.ref(self)))
                self._hooks.append(home.parameter.register_hook(before))
                self._hooks.append(home.parameter.register_post_accumulate_grad_hook(hook))

    # ---- gradients ----

    def take_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Comes after autograd made p.grad or added to it."""
        self.demand.freed()
        home = self.presence.by_id[id(parameter)]
        self.presence.users.note_gradient()
        gradient = parameter.grad
        if gradient is None:
            return
        if not isinstance(gradient, Gradient):  # else autograd has added to it
            self.presence.look()
            if gradient.requires_grad:
                parameter.grad = None
                raise StateError(
                    f"the gradient of '{home.name}' has a graph of its own (create_graph=True), which would hold "
                    "parameters that come and go; call torch.autograd.grad(), which returns gradients instead"
                )
            parameter.grad = self.presence.gradients.put(home, gradient)
        if self._counts:
            self._arrived.note(home)

    def end_backward(self) -> None:
        """Ends a micro-batch, where these are counted. Where others are ranks, each parameter then has a gradient: one of them may
        have used parameters that this one did not, and all use gradients in the same order."""
        if self._counts:
            with self.presence.lock:
                if self.presence.updates.in_backward or self._sums_in_backward:
                    self.presence.release_all()  # which makes gradients final
                self.engine.own.end_micro_batch()
        self.complete()

    def set_micro_batch(self, number: int) -> None:
        """Says of which micro-batch of a reproducible step gradients are from now on, where passes are not counted. As many as there are: all
        have ended."""
        if self.engine.options.reproducible and self.presence.trainable:
            with self.presence.users, self.presence.lock:
                self.presence.begin_step()  # which a stage that has trained nothing lacks
                self.engine.own.set_micro_batch(number)

    def complete(self) -> None:
        """Gives each trained parameter a gradient that has none, where there are other ranks or could be, with the same bits: as many numbers
        are then added to a norm."""
        if self._together.ranks is not None or self.engine.options.reproducible:
            with self.presence.lock:
                for home in self.presence.homes:
                    if home.trainable and home.parameter.grad is None:
                        home.parameter.grad = self.presence.gradients.put(home, None)

    # ---- the step ----

    def step(self, settings: Sequence[Settings], gradient_factor: float = 1.0) -> None:
        """Updates every parameter that has a gradient, times the factor; updates may go on after the call. With updates in
        backward only gradients that the user put there since are applied."""
        presence = self.presence
        presence.check_open("the model was closed, and its parameters are plain tensors; wrap it again")
        reproducible = self.engine.options.reproducible
        with presence.users, presence.lock:
            model = self.model()
            if reproducible and model is not None:
                self._together.compare_buffers(model)
            self._exchange()
            got = [home for home in presence.homes if self._collect(home)]
            alone = self._together.ranks is None
            if not alone:
                self.complete()
            if model is not None:
                _homes.check_places(model, got)
            presence.check_unwritten(presence.homes)
            presence.gradients.prepare()  # before a wait for a GPU, which would have nothing to do meanwhile
            if not presence.updates.end(presence, got, settings, gradient_factor) and alone:
                raise StateError(f"optimizer.step() is called, and no parameter of the wrapped model has a gradient{self._added()}")
            if not reproducible and model is not None:
                self._together.share_buffers(model)

    def _added(self) -> str:
        """Returns a message's advice for where no wrapped parameter has a gradient."""
        named = () if (model := self.model()) is None else model.named_parameters()
        added = [name for name, p in named if p.grad is not None and id(p) not in self.presence.by_id]
        if not added:
            return "; call backward() before"
        return (
            f". '{added[0]}' has one, and came into the model after it was wrapped ({len(added)} such parameters): "
            "sluice.torch.close() the model, add to it what is to be trained, and wrap it again"
        )

    def _exchange(self) -> None:
        """Makes gradients plain that the user gave to other parameters, before any of them ends."""
        for home in () if self.presence.updates.in_backward else self.presence.homes:
            gradient = home.parameter.grad
            if isinstance(gradient, Gradient) and gradient._slot.home is not home:
                home.parameter.grad = gradient._slot.values()

    def _collect(self, home: Home) -> bool:
        """Returns whether the parameter has a gradient, and puts one that the user gave it into the engine."""
        gradient = home.parameter.grad
        if gradient is None:
            self.presence.gradients.give_up(home)  # an old reference to it becomes an error
            return False
        if not home.trainable:
            raise StateError(
                f"'{home.name}' was frozen when the model was wrapped, and has a gradient now; to train it, "
                "sluice.torch.close() the model, and wrap it again with requires_grad set; it may be frozen after that, and "
                "unfrozen at any step"
            )
        if self.presence.updates.in_backward and isinstance(gradient, Gradient):
            return True
        if isinstance(gradient, Gradient):
            gradient._slot.check()
        else:
            home.parameter.grad = self.presence.gradients.put(home, gradient)
        home.check_memory()
        return True


def _with_values(presence: Presence) -> None:
    """Ends the engine, and leaves the parameters where they are; all ranks do so. Raises BudgetError, with nothing changed, where they do
    not fit."""
    engine, ranks = presence.engine, presence.engine.options.ranks
    if ranks is not None and ranks.failure and any("shard" in unit for unit in engine.plan()["units"]):
        raise StateError(
            f"the ranks have parts of the parameters (stage 3), and {ranks.failure}, so that this one cannot have all values; end with "
            "sluice.torch.close(model, values=False), which leaves its parameters on the meta device, and go on from a checkpoint"
        )
    try:
        presence.release_all()
        engine.agreed("closing the model", engine.check_leaving)
        presence.engine.leave(values=True)
    except BudgetError as error:
        raise BudgetError(
            f"{error}. Save the model (model.save_pretrained(folder), or sluice.torch.save_file(model.state_dict(), "
            "path)), and end with sluice.torch.close(model, values=False), which leaves its parameters on the meta "
            "device; or wrap it with more memory"
        ) from None


def _with_values_of_gpu(presence: Presence) -> None:
    """The same on a GPU, where parameters get memory of PyTorch's, besides that of the engine."""

    def copied() -> list[torch.Tensor]:
        try:
            return [_full.in_gpu(presence, home, _abi.READ).clone() for home in presence.homes]
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the values of the model do not fit as plain tensors in what is left to PyTorch of device_memory ({error}). Save the "
                "model (sluice.torch.engine_of(model).save(folder)), and end with sluice.torch.close(model, values=False), which "
                "leaves its parameters on the meta device"
            ) from error

    values = presence.engine.agreed("closing the model", copied)
    presence.release_all()
    for home, plain in zip(presence.homes, values, strict=True):
        _homes.show(home.parameter, plain)


def _without_values(presence: Presence) -> None:
    """Ends the engine, and gives the model parameters on the meta device. Its old parameters must not be touched."""
    if (model := presence.model()) is not None:
        places = places_of(model)
        for home in presence.homes:
            if id(home.parameter) in places:
                replace(places, home.parameter, torch.empty_like(home.parameter, device="meta"))
    if presence.engine.gpu is None:
        presence.engine.leave(values=False)
    for home in () if presence.engine.gpu is None else presence.homes:
        _homes.show(home.parameter, torch.empty(0, dtype=home.memory.dtype, device=home.memory.device))


def _engine_for(model: torch.nn.Module, prepared: Prepared) -> ModelEngine:
    if prepared.gpu is not None:
        prepared.gpu.give_back()  # what PyTorch's allocator keeps, and no tensor has, counts as free
    try:
        with prepared.planning():
            return ModelEngine(prepared.units, prepared.options, prepared.gpu)
    except BudgetError as error:
        if prepared.gpu is None or not (there := prepared.gpu.bytes_of(model)):
            raise
        raise BudgetError(
            f"{error}. The model's parameters are on the GPU already, where they take {there >> 20} MiB beside that until they have "
            "moved; if that is what is missing, keep the model on the CPU, or on the meta device, until wrap(device='cuda')"
        ) from error


def _before_gradient(session: weakref.ref[Session], gradient: torch.Tensor) -> None:
    if (alive := session()) is not None:
        alive._calls.begin_pass()


def _on_gradient(session: weakref.ref[Session], parameter: torch.nn.Parameter) -> None:
    if (alive := session()) is not None:
        alive.take_gradient(parameter)
