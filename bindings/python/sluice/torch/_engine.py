"""A wrapped model's engine as users have it, and what its checkpoints have beside values and state: buffers, and the settings of
parameter groups."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch

from .._library import library
from ..device import device_of, facts_of, predicted
from ..engine import Engine, Values, plan
from ..errors import CorruptError, InvalidArgumentError, StateError, knows_its_keywords
from ..model import Options, Path, Unit
from ._gpu import CPU, Account, Gpu
from ._homes import Lent, Span
from ._measures import FirstStep, Ready
from ._safetensors import TYPES, pieces_of, tensors_of

T = TypeVar("T")

_BUFFERS, _GROUPS = "buffers.safetensors", "groups.json"
_VERSION = 1


def _refused(call: str, remedy: str) -> Any:
    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise StateError(
            f"{call}() is called on the engine of a wrapped model, whose hooks and whose optimizer do that themselves; {remedy}"
        )

    return refuse


class ModelEngine(Engine):
    """The engine of a wrapped model. Its parameters are tensors, which may outlive it: a unit's addresses stay reserved until the last
    tensor over them is gone, views that the user made included. A user may save, load and set values; calls for steps and units are
    refused, since the model's hooks and its optimizer make them."""

    _by_address = True
    first_step: FirstStep | None = None
    ready: Ready | None = None
    presence: weakref.ref[Any] | None = None  # a Presence of _presence.py, once the model has moved in
    optimizer: Callable[[], Any] = staticmethod(lambda: None)  # an Optimizer of _optimizer.py, as long as it lives
    # Of a stage of a pipeline: the names of all stages' buffers, and what gathers them from their own.
    buffers_of_all: tuple[Sequence[str], Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] | None = None

    begin_step = _refused("begin_step", "a forward pass with gradients begins a step")
    step = _refused("step", "call step() of the optimizer that sluice.torch.wrap() gave")
    abandon_step = _refused("abandon_step", "optimizer.zero_grad() drops what the step has")
    end_micro_batch = _refused("end_micro_batch", "each backward() of a model that was wrapped with accumulate= ends one")
    set_micro_batch = _refused("set_micro_batch", "a Pipeline that is made with reproducible=True does so")
    end_gradients = _refused("end_gradients", "backward() of a model that was wrapped with accumulate= says so")
    acquire = _refused("acquire", "a unit is there when its module is called, and whenever a parameter is touched")
    add_gradient = _refused("add_gradient", "add to p.grad of the model's parameter")
    multiply_gradient = _refused("multiply_gradient", "multiply p.grad of the model's parameter (p.grad.mul_(factor))")
    drop_gradient = _refused("drop_gradient", "set p.grad of the model's parameter to None")
    replan = _refused("replan", "what PyTorch needs is found at each call of the model, or stated as wrap(reserve=...)")

    def __init__(self, units: Sequence[Unit], options: Options, gpu: Gpu | None = None) -> None:
        """gpu: where the parameters are; None: in the memory of the CPU."""
        super().__init__(units, options)
        self.gpu = gpu
        self.device = CPU if gpu is None else gpu.device  # to PyTorch
        self._queues_on = 0  # the stream; 0: the default one
        self._seen: list[tuple[list[int], weakref.ref[Any]]] = []  # the units of each tensor, and the memory that it was lent
        self.left = False  # whether sluice.torch.close() has closed it
        self.ended = False  # whether it was closed while views of a GPU's memory were there

    @property
    def own(self) -> Engine:
        """This engine with all calls, also those that users are refused: for the model's hooks and its optimizer."""
        return cast(Engine, super())

    def tensor(self, spans: Sequence[Span], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a parameter's memory, which is not touched. The tensor and its views keep the engine alive until it
        is closed."""
        address = self._handle.ask("sluice_engine_parameter", spans[0].index, kind=ctypes.c_void_p) or 0
        units = [span.unit for span in spans]
        lent = Lent(self)
        self._seen.append((units, weakref.ref(lent)))
        return lent.tensor(address, shape, dtype, self.device)

    def follow_stream(self, moves: bool = True) -> None:
        """Comes before calls that have to do with PyTorch's work on a GPU: tells the engine where PyTorch queues it now. moves:
        units may move, which is refused while a graph is captured there."""
        if self.gpu is None or (stream := self.gpu.stream()) == self._queues_on or (not moves and self.gpu.captures):
            return
        self._handle.call("sluice_engine_use_stream", stream)
        self._queues_on = stream

    def account(self) -> Account:
        """Returns the free bytes of the GPU's memory, and the engine's bytes there."""
        lines = {line.purpose: line.current for line in self.ledger() if line.tier == "device"}
        device = device_of(self)
        return Account(device["free"], lines["total"] - lines["base"], device["shared"])  # the base is for CUDA and PyTorch

    def plan_with(self, of_pytorch: int) -> dict[str, Any]:
        """The plan of a GPU that leaves PyTorch so many bytes of its memory, by the rates of this one. Raises BudgetError where there is
        none."""
        assert self.gpu is not None, "the plan is a GPU's"
        given_back = sum(line.current for line in self.ledger() if (line.tier, line.purpose) == ("host", "total"))
        options = dataclasses.replace(
            self.options, device_reserved=of_pytorch + self.gpu.beside, given_back=given_back, device_facts=facts_of(self)
        )
        return plan(self.units, options)

    def end_on_gpu(self) -> None:
        """Closes the engine of a GPU, without values. Where users have views of its memory, that is theirs until the last of
        them is gone, and has no values any more."""
        self.ended = True
        if self._is_seen():
            gc.collect()
        if not self._is_seen():
            super().close()

    def _is_seen(self) -> bool:
        return any(reference() is not None for _, reference in self._seen)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.ended or self._handle.closed

    def state_is_taken(self, error: str | None = None) -> None:
        """On rank 0: it has the state of all units, or an error; on another rank: waits for that, and raises a StateError with it."""
        self._handle.call("sluice_engine_state_is_taken", None if error is None else error.encode(errors="replace"))

    def agreed(self, what: str, make: Callable[[], T]) -> T:
        """Returns what make() returns. Where ranks train the model together, and none has failed, it raises on every one of them where it
        raises on one."""
        ranks = self.options.others
        return make() if ranks is None or ranks.failure else ranks.agreed(what, make)

    def check_leaving(self) -> None:
        """Raises BudgetError where leave(True) would."""
        self._handle.call("sluice_engine_leave", 1, 0, None)

    def leave(self, values: bool) -> None:
        """Closes the engine. The tensors then lie in ordinary memory with their values, or, without `values`, in none, and
        a touch ends the process with a message. Raises BudgetError, with nothing changed, where there is too little
        memory; after any other error the tensors of some units have no values."""
        homes = (ctypes.c_void_p * len(self.units))()
        try:
            self._handle.call("sluice_engine_leave", 1 if values else 0, 0, homes)
        finally:
            kept = [None if home is None else _FormerHome(home) for home in homes]
            if all(home is not None for home in kept):
                for units, reference in self._seen:
                    if (lent := reference()) is not None:
                        lent.keeps = [kept[unit] for unit in units]
                super().close()

    def close(self) -> None:
        """Closes the engine without keeping the values, which sluice.torch.close() keeps."""
        if self.presence is not None and (presence := self.presence()) is not None:
            presence.forget_held()
        if self.closed or self._handle.inherited:
            return
        if self.gpu is None:
            self.leave(values=False)
        else:
            self.end_on_gpu()

    # ---- what users call ----

    def plan(self) -> dict[str, Any]:
        """The engine's plan, with "pytorch": the bytes that PyTorch was estimated to take at once ("peak"), those that were
        planned for it ("reserve"), and those that the first step took ("measured"); None for what is not known. On a GPU
        also what was taken "beside" that and of the "host", and "seconds", by which the plan then says how long a step takes: the
        README of bindings/python says what they are. "ready" has the seconds in which the model was made ready, by phase."""
        computing = None if self.first_step is None else self.first_step.computing()
        made = super().plan() if computing is None else predicted(self, computing)
        if self.ready is not None:
            made["ready"] = dict(self.ready.seconds)
        return made if self.first_step is None else {**made, "pytorch": self.first_step.as_dict()}

    @knows_its_keywords
    def save(self, out: Path, keep: int = 0, files: Mapping[str, Sequence[Any]] | None = None) -> str:
        """Saves as Engine does, also after forward passes, with the model's buffers (those of its state_dict()) and the settings of
        the parameter groups. A warning names what of the model the checkpoint has not. Raises StateError where a step has gradients."""
        with self._turn() as presence:
            if presence is None or (model := presence.model()) is None:
                return super().save(out, keep, files)
            for name in {_BUFFERS, _GROUPS} & (files or {}).keys():
                raise InvalidArgumentError(f"'{name}' is a file of the checkpoint's own; give yours another name")
            presence.end_begun_step("saved")
            beside, lacking = _files_of(model, self)
            made = super().save(out, keep, {**(files or {}), **beside})
        if lacking:
            warnings.warn(f"the checkpoint '{made}' has not {', '.join(lacking)}; save that yourself", UserWarning, stacklevel=3)
        return made

    def load(self, path: Path) -> None:
        """Loads as Engine does, also after forward passes, whose graphs backward then refuses; and what save() has beside. A warning
        says so where the checkpoint has none of that. Raises StateError where a step has gradients."""
        with self._turn() as presence:
            if presence is None or (model := presence.model()) is None:
                return super().load(path)
            presence.end_begun_step("loaded")
            folder, take = self.agreed("what a checkpoint has beside", functools.partial(self._read_extras, path, model))
            self._check_alike(folder)
            super().load(folder)
            presence.changed()
            take()

    def _check_alike(self, folder: Path) -> None:
        """Raises InvalidArgumentError where another rank has found another checkpoint: it sees another folder, or one that is damaged."""
        if (ranks := self.options.others) is None:
            return
        found = [name.decode() for name in ranks.exchange("the checkpoint to load", os.path.basename(os.fspath(folder)).encode())]
        for rank, name in enumerate(found):
            if name != found[0]:
                raise InvalidArgumentError(
                    f"of the folder to load from rank {rank} has '{name}' as its newest whole checkpoint, and rank 0 '{found[0]}': name one "
                    "checkpoint that is whole on all ranks"
                )

    def _read_extras(self, path: Path, model: torch.nn.Module) -> tuple[Path, Callable[[], object]]:
        """The checkpoint's folder, and a function that sets what it has beside values and state."""
        groups = self.checkpoint_file(path, _GROUPS)
        folder = os.path.dirname(groups)
        if groups and (buffers := self.checkpoint_file(folder, _BUFFERS)):
            elsewhere = () if self.buffers_of_all is None else self.buffers_of_all[0]
            try:
                return folder, _reader_of(model, self.optimizer(), buffers, groups, elsewhere)
            except InvalidArgumentError:
                self.find_checkpoint(folder)  # says so where the values are of another model, too
                raise
        folder = self.find_checkpoint(path)
        warnings.warn(
            f"the checkpoint '{folder}' was not saved by a wrapped model: it has neither buffers nor the settings of "
            "parameter groups, which stay as they are",
            UserWarning,
            stacklevel=4,
        )
        return folder, lambda: None

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
    def _turn(self) -> Iterator[Any]:
        """A `with` in which no other thread uses the model. Yields None where it is not wrapped."""
        presence = None if self.presence is None or self.closed else self.presence()
        with contextlib.nullcontext() if presence is None else presence.users:
            yield presence


class _FormerHome:
    """Keeps a unit's addresses reserved for as long as this object lives."""

    def __init__(self, address: int) -> None:
        weakref.finalize(self, library().sluice_home_destroy, address).atexit = False


# ---- what checkpoints have beside ----


def _files_of(model: torch.nn.Module, engine: ModelEngine) -> tuple[dict[str, list[memoryview]], list[str]]:
    """The files, in pieces, and what cannot be saved, in words."""
    lacking = [
        f"the extra state of '{name}' ({type(module).__name__}.get_extra_state())"
        for name, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    buffers = saved_buffers(model)
    lacking += [f"the buffer '{name}' ({b.dtype}, {b.layout})" for name, b in buffers.items() if not _can_be_saved(b)]
    buffers = {name: buffer for name, buffer in buffers.items() if _can_be_saved(buffer)}
    if engine.buffers_of_all is not None:
        buffers = engine.buffers_of_all[1](buffers)
    optimizer = engine.optimizer()
    told: list[dict[str, Any]] | None = None
    if optimizer is not None:
        told = optimizer.told()
        for number, group in enumerate(told):
            for key in [key for key, value in group.items() if not _is_plain(value)]:
                del group[key]
                lacking.append(f"'{key}' of parameter group {number}")
    text = json.dumps({"version": _VERSION, "groups": told}, indent=1).encode()
    return {_BUFFERS: pieces_of(buffers), _GROUPS: [memoryview(text)]}, lacking


def saved_buffers(model: torch.nn.Module, recurse: bool = True) -> dict[str, torch.Tensor]:
    """The buffers that a model's, or with recurse=False a module's own, state_dict() has."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in (model.named_modules() if recurse else [("", model)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }


def _can_be_saved(buffer: torch.Tensor) -> bool:
    if buffer.dtype not in TYPES or buffer.layout != torch.strided:
        return False
    # Elements that share memory, as expand() makes them, cannot be written.
    return all(size < 2 or stride for size, stride in zip(buffer.shape, buffer.stride()))


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the value back, but for tuples, which become lists."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _reader_of(model: torch.nn.Module, optimizer: Any, of_buffers: str, of_groups: str, elsewhere: Collection[str]) -> Callable[[], None]:
    """A function that sets buffers and parameter groups to what a checkpoint's files of these have. elsewhere: buffers that may be other stages'.
    Raises InvalidArgumentError or CorruptError where they do not fit."""
    found = tensors_of(of_buffers)
    buffers = {name: buffer for name, buffer in saved_buffers(model).items() if _can_be_saved(buffer)}
    for name in (found.keys() ^ buffers.keys()) - (found.keys() & set(elsewhere)):
        which = "this model" if name in found else "the checkpoint"
        raise InvalidArgumentError(
            f"'{of_buffers}' is of another model: {which} has no buffer '{name}'; build the model as it was when the checkpoint was saved"
        )
    for name, buffer in buffers.items():
        if (found[name].dtype, found[name].shape) != (buffer.dtype, tuple(buffer.shape)):
            raise InvalidArgumentError(
                f"the buffer '{name}' is {found[name].dtype} {list(found[name].shape)} in '{of_buffers}', and {buffer.dtype} "
                f"{list(buffer.shape)} in the model"
            )
    values = {name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu") for name, buffer in buffers.items()}
    for name, value in values.items():
        found[name].read(0, value.view(-1))
    told = _told_in(of_groups)
    try:
        take_groups = None if optimizer is None or told is None else optimizer.taken(told)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"'{of_groups}' has other parameter groups than this optimizer: {error}") from error

    def take() -> None:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(values[name])
        if take_groups is not None:
            take_groups()

    return take


def _told_in(path: str) -> list[dict[str, Any]] | None:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        told = json.loads(text)
        version = told["version"]
        groups: list[dict[str, Any]] | None = told["groups"]
        if groups is not None:
            groups = [{**group, "params": [str(name) for name in group["params"]]} for group in groups]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"'{path}' is not what a wrapped model saves: {error!r}") from error
    if version != _VERSION:
        raise InvalidArgumentError(f"'{path}' is of version {version!r}, and {_VERSION} can be read; use the Sluice that wrote it")
    return groups
