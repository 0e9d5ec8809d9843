"""Pipelines as users make them. Their stages are ranks, each in a process of its own, or threads of one process, each on a GPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import hashlib
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Optional, TypeVar

import torch

from .._handle import handlers_later, of_thread
from ..errors import BudgetError, Error, InvalidArgumentError, StateError
from ..model import Folder, Path, Size, folders_of, size_of
from ..optimizers import Optimizer as Settings
from ..ranks import Ranks, shared_memory
from ._estimate import autocast_types
from ._gpu import CPU, gpus_seen
from ._guards import override, restore
from ._measures import Ready, resident_bytes
from ._modes import mapped, outside_of_graphs
from ._moving import DRAWN
from ._optimizer import Optimizer
from ._pipeline import Loss, Stage, refuse_to_save
from ._prepare import Prepared
from ._safetensors import InFiles
from ._stages import Cut, model_of
from ._together import Together, Which, size_and_rank
from ._wrap import PIPELINE, full_parameters, hands_to_wrap, session_of

T = TypeVar("T")

_GRACE = 5.0  # seconds that the others have to come to the end of a call in which a stage had an error


# ---- the threads ----


class _Turns:
    """The turns of a stage's thread, of which one computes at a time. State that a process has once is then that stage's: its random
    numbers are its own, and those of the process are stage 0's."""

    def __init__(self, baton: _Baton, stage: int, shares: Optional[torch.device]) -> None:
        """shares: the GPU that the stage has with an earlier one."""
        self._baton, self._stage = baton, stage
        own: list[tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]] = []
        if stage > 0:
            own.append((torch.get_rng_state, torch.set_rng_state))
        if shares is not None and torch.cuda.is_available():
            to_gpu = functools.partial(torch.cuda.set_rng_state, device=shares)
            own.append((functools.partial(torch.cuda.get_rng_state, shares), to_gpu))
        self._generators, self._states = own, [get() for get, _ in own]

    def _exchange(self) -> None:
        """Exchanges the states of the stage's random numbers and the process's."""
        for number, (get, put) in enumerate(self._generators):
            there = get()
            put(self._states[number])
            self._states[number] = there

    def _begin(self) -> None:
        self._baton.lock.acquire()
        self._baton.stage = self._stage
        self._exchange()

    def _end(self) -> None:
        self._exchange()
        self._baton.stage = None
        self._baton.lock.release()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A `with` that is a turn."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` in a turn in which the stage waits, and the others have turns."""
        self._end()
        try:
            yield
        finally:
            self._begin()


class _Baton:
    """The right to compute, which one stage's thread has at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stage: Optional[int] = None  # whose thread has it


class _Modes(NamedTuple):
    """PyTorch's modes of each thread, which a caller sets around a step."""

    gradients: bool
    inference: bool
    autocast: Sequence[Optional[torch.dtype]]

    @staticmethod
    def now() -> _Modes:
        return _Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_types())

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """A `with` in which they are in force."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in zip(("cpu", "cuda"), self.autocast, strict=True):
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


class _Ranks(Ranks):
    """The place of a stage's thread among those of this process."""

    tells_of_exceptions = False  # the caller may go on, as in a notebook
    failed: list[int]  # the stages that had errors of their own, in the order of these

    def fail(self, text: str) -> None:
        self.failed.append(self.rank)
        super().fail(text)

    def agreed(self, name: str, make: Callable[[], T]) -> T:
        def noted() -> T:
            try:
                return make()
            except Error:
                self.failed.append(self.rank)
                raise

        return super().agreed(name, noted)


class _Threads:
    """A thread for each stage, in which everything of that stage is called. The caller waits."""

    def __init__(self, gpus: Sequence[torch.device], silence: float, patience: float) -> None:
        self.baton = _Baton()
        self._failed: list[int] = []
        self._in_call = threading.Lock()
        self.joined = [Together()] if len(gpus) == 1 else self._join(len(gpus), silence, patience)
        self._turns = [_Turns(self.baton, stage, gpu if gpu in gpus[:stage] else None) for stage, gpu in enumerate(gpus)]
        self._pools = [
            concurrent.futures.ThreadPoolExecutor(1, f"stage {stage}", functools.partial(_begin_thread, turns, gpu))
            for stage, (turns, gpu) in enumerate(zip(self._turns, gpus, strict=True))
        ]

    def _join(self, count: int, silence: float, patience: float) -> list[Together]:
        descriptor = shared_memory(count)
        try:
            ranks = [_Ranks.local(descriptor, stage, silence=silence, patience=patience) for stage in range(count)]
        finally:
            os.close(descriptor)
        for each in ranks:
            each.failed = self._failed
        return [Together(each, count) for each in ranks]

    def all(self, call: Callable[[int], T]) -> list[T]:
        """Calls a function for each stage, by its number, in its thread and in the caller's modes. Returns what it returns. Raises the error
        that came first."""
        if not self._in_call.acquire(blocking=False):
            raise StateError(
                "a Pipeline is used by two threads at the same time, or by a layer or loss_fn that it calls; let them use it one after another"
            )
        calls: list[concurrent.futures.Future[T]] = []
        try:
            self._failed.clear()
            modes = _Modes.now()
            with handlers_later():  # Ctrl-C waits, so that all stages come to the end and the pipeline can go on
                for stage, (pool, turns) in enumerate(zip(self._pools, self._turns, strict=True)):
                    calls.append(pool.submit(contextvars.copy_context().run, self._called, turns, modes, call, stage))
                concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_EXCEPTION)
                if concurrent.futures.wait(calls, _GRACE).not_done and (ranks := self.joined[0].ranks) is not None:
                    Ranks.fail(ranks, "another stage had an error in the same call")
                concurrent.futures.wait(calls)
                for stage in self._failed:
                    calls[stage].result()
                return [each.result() for each in calls]
        finally:
            calls.clear()  # errors refer to this frame
            self._in_call.release()

    def _called(self, turns: _Turns, modes: _Modes, call: Callable[[int], T], stage: int) -> T:
        with turns.computing(), modes.there():
            try:
                return call(stage)
            except BaseException:
                self._failed.append(stage)
                raise

    def close(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()


def _begin_thread(turns: _Turns, gpu: torch.device) -> None:
    of_thread.waiting = turns.waiting
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)  # so that "cuda" is that of the stage


# ---- what a stage has of the model ----


_Copies = dict[torch.nn.Module, torch.nn.Module]


def _copy_of(module: torch.nn.Module, made: _Copies) -> torch.nn.Module:
    """A module with copies of those in it and with hooks of its own, and with the same tensors. made: what there is of it."""
    if module in made:
        return made[module]
    twin = made[module] = object.__new__(type(module))
    own = vars(twin)  # what torch.compile() makes of a module hands on what is set
    for key, value in vars(module).items():
        if (key in _OF_MODULES and isinstance(value, (dict, set))) or key == "_flat_weights":
            value = copy.copy(value)  # PyTorch keeps the weights of an LSTM in a list, too, and writes to it where one is set
        elif isinstance(value, types.MethodType) and value.__self__ is module:
            value = types.MethodType(value.__func__, twin)
        own[key] = value
    own["_modules"] = {name: None if child is None else _copy_of(child, made) for name, child in module._modules.items()}
    return twin


_OF_MODULES = vars(torch.nn.Module()).keys()  # what each module has: its tensors and hooks by name
_HOOKS = [name for name in _OF_MODULES if "_hooks" in name and isinstance(vars(torch.nn.Module())[name], dict)]


class _CutHere(Cut):
    """The cut of a copy of the model, in which this stage's layers are the model's own. Layers of other stages are copies, which
    this stage drops."""

    def __init__(self, whole: torch.nn.Module, *given: Any) -> None:
        super().__init__(*given)
        for name in (name for number in self.own for name in self.names[number]):
            holder, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(holder), own, whole.get_submodule(name))

    def forget_others(self) -> None:
        super().forget_others()
        for p in self.model.parameters():
            vars(p).pop(DRAWN, None)  # which another stage has set


class _StageHere(Stage):
    """A stage whose thread is one of this process."""

    def __init__(
        self, whole: torch.nn.Module, copies: _Copies, baton: _Baton, gpus: Sequence[torch.device], of_process: int, *args: Any, **given: Any
    ) -> None:
        """copies: of the model's modules. gpus: those of all stages. of_process: the budget of memory, of which the stage has a share."""
        self._whole, self._copies, self._gpus, self._of_process = whole, copies, gpus, of_process
        try:
            super().__init__(copies.get(whole, whole), *args, **given)
        except BaseException:
            if (cut := vars(self).get("_cut_of")) is not None:
                cut.close()
            raise
        own = set(self.module.modules())
        self._copies = {module: twin for module, twin in copies.items() if twin in own}
        for module, twin in self._copies.items():
            vars(twin).update((name, vars(module)[name]) for name in _HOOKS)  # also those that a user will add
        session_of(self.module).presence.users.check = functools.partial(_check_turn, baton, self.stage)

    def _cut_model(self, *given: Any) -> Cut:
        return _CutHere(self._whole, *given)

    def _given_back(self, prepared: Prepared) -> int:
        return int(prepared.options.given_back)  # also the other stages' part

    def _agree(self) -> None:
        if self._ranks is not None:
            self._ranks.barrier("moving the model in")

    @property
    def _places(self) -> Sequence[torch.device]:
        return [CPU, *self._gpus]

    def _run(self, *given: Any) -> torch.Tensor:
        for module, twin in self._copies.items():  # eval() and the like change the model's own
            vars(twin).update((key, value) for key, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
        return super()._run(*given)

    def _digest(self, batch: Any) -> bytes:
        return bytes(hashlib.sha256().digest_size)  # all stages have the same object

    def _moved_in(
        self, model: torch.nn.Module, prepared: Prepared, stored: Mapping[str, InFiles], ready: Ready
    ) -> tuple[torch.nn.Module, Optimizer]:
        return super()._moved_in(model, prepared._replace(memory=self._of_process), stored, ready)  # what the process takes is compared with that


def _check_turn(baton: _Baton, stage: int) -> None:
    """Comes before a stage's layers are called."""
    if (now := baton.stage) not in (None, stage):
        raise InvalidArgumentError(
            f"a layer of stage {now} calls one that stage {stage} has; cut the model so that one stage has both (stages=...), or give the layer "
            "what it needs as a value that layers pass on"
        )


# ---- the optimizer of all stages ----


class _OptimizerOfStages(Optimizer):
    """The optimizer of the stages of this process, with the parameters of all of them."""

    def __init__(self, stages: Sequence[Stage], threads: _Threads, model: torch.nn.Module) -> None:
        self._stages, self._threads, self._sealed = stages, threads, False
        order = {id(p): number for number, p in enumerate(model.parameters())}
        groups = []
        for of_stages in zip(*(stage.optimizer.param_groups for stage in stages), strict=True):
            members = [p for group in of_stages for p in group["params"]]
            groups.append({**of_stages[0], "params": sorted(members, key=lambda p: order[id(p)])})
        first = stages[0].optimizer
        torch.optim.Optimizer.__init__(self, groups, first.defaults)
        self._first, self._session = first._first, first._session
        self._members = [[id(p) for p in group["params"]] for group in self.param_groups]
        self._sealed = True

    def _settings(self) -> list[Settings]:
        """The groups' settings, which the stages get, too."""
        found = super()._settings()
        for stage in self._stages:
            for group, own in zip(self.param_groups, stage.optimizer.param_groups, strict=True):
                own.update((key, value) for key, value in group.items() if key != "params")
        return found

    def ask(self) -> None:
        """Takes the settings of stage 0, which all stages have."""
        for group, own in zip(self.param_groups, self._stages[0].optimizer.param_groups, strict=True):
            group.update((key, value) for key, value in own.items() if key != "params")

    def _update(self, factor: float) -> None:
        if factor != 1:
            raise StateError(f"the gradients of a Pipeline are to be multiplied by {factor:.6g} (GradScaler), which is for models that are wrapped whole")
        self._settings()

        def step(stage: int) -> None:
            with self._stages[stage]._failing():
                self._stages[stage].optimizer.step()

        self._threads.all(step)

    @outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of each torch.optim.Optimizer."""
        self._threads.all(lambda stage: self._stages[stage].optimizer.zero_grad(set_to_none))

    def _read(self) -> dict[int, Any]:
        of_stages = self._threads.all(lambda stage: self._stages[stage].optimizer._read())
        state = {own[i]: array for own, arrays in zip(self._places(), of_stages, strict=True) for i, array in arrays.items()}
        return dict(sorted(state.items()))

    def _write(self, given: Mapping[int, Any]) -> None:
        places = self._places()

        def write(stage: int) -> None:
            self._stages[stage].optimizer._write({i: given[place] for i, place in enumerate(places[stage]) if place in given})

        self._threads.all(write)

    def _places(self) -> list[list[int]]:
        """By stage, for each of its parameters, the number of that in all groups."""
        number = {key: i for i, key in enumerate(key for group in self._members for key in group)}
        return [[number[id(p)] for group in stage.optimizer.param_groups for p in group["params"]] for stage in self._stages]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return any(stage.optimizer._step_supports_amp_scaling for stage in self._stages)


# ---- what users make ----


@hands_to_wrap
class Pipeline(Stage):
    """A model that is cut by its layers over ranks: each trains a stage, and wraps that part alone.

        pipe = sluice.torch.Pipeline(model, sluice.AdamW(lr=1e-4), memory="8GiB", micro_batches=8, mesh="data=2,pipeline=4")
        loss = pipe.train_step((inputs, targets), loss_fn)

    model: a torch.nn.Sequential, a list of layers whose calls follow one another, or a causal model of transformers, which is
        cut between its blocks. All ranks give the same one, with the same values, or on the meta device. Afterwards the model on a rank
        has the layers of its stage alone, under their names in the whole.
    optimizer: as for wrap(). `pipe.optimizer` is the torch.optim.Optimizer of this stage's parameters, for LR schedulers.
    micro_batches: into how many parts of one size a batch is cut, along its first dimension.
    mesh: the axes of all ranks: the model is cut along "pipeline", and ranks that differ along "data" have the same stage and other
        batches. Ranks that follow each other differ in the last axis. None: all ranks are stages, rank r stage r.
    pipeline: "1f1b" (a stage goes back as soon as it can, and holds few micro-batches) or "gpipe" (all forward passes come first) or
        "zb-h1" (as 1f1b, with gradients of weights when a stage would wait).
    chunks: how many chunks of consecutive layers or blocks each stage has. With more than one the stages are interleaved: a micro-batch
        passes through all of them so many times, stages wait less for each other, and hold more micro-batches.
    stages: the layers or blocks of each stage, as "0-7,8-11", and with chunks=2 those of the first chunks of all stages, then of the
        second ones: "0-1,2-3,4-7,8-11". None: so that none has many more parameters than the others.
    reproducible: the bits of one rank that wraps the whole model with reproducible=True, on any mesh: ranks that differ along "data" have
        equal shares of one batch, in order. But for dropout: each rank draws random numbers of its own, so that bits depend on the mesh.
    devices: the GPUs of the stages, as ["cuda:0", "cuda:1"]: all stages are then threads of this process, which no torchrun has started. The
        model is on the CPU or on the meta device, and stays whole; `optimizer` has all its parameters. `memory` and the limits of `disk` are
        those of the process, of which each stage has the same share, and `device_memory` and `reserve` those of each stage.
    ranks, silence, patience, and options: as of wrap(); `memory` and so on are those of each rank, and `stage` is what the ranks of a
        pipeline stage partition (ZeRO). With `device` and `device_memory` each stage computes on a GPU, as ranks that wrap() a model do:
        "cuda" is that of LOCAL_RANK. `reserve` is then what PyTorch takes there for all micro-batches that a stage holds at once.

    All ranks call all functions, in the same order. Without `reproducible` the bits are those of as many ranks as there are along
    "data", of which each wraps the whole model and adds up the gradients of the same micro-batches' losses, each divided by their number, in
    their order; random numbers of dropout are each rank's own. A rank that fails ends the work of all, with an error that names it.
    docs/guide/pipelines.md says more.

    stage, stages, data_rank, data_ranks: this rank's place along "pipeline" and along "data", and how many there are.
    modules: the parts of the model that the stages in this process have; engine_of() has the engine of each.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Settings,
        *,
        memory: Size,
        micro_batches: int,
        pipeline: str = "1f1b",
        chunks: int = 1,
        stages: Optional[str] = None,
        mesh: Optional[str] = None,
        weights: Optional[Path] = None,
        devices: Optional[Sequence[Any]] = None,
        ranks: Which = None,
        silence: float = 30.0,
        patience: float = 600.0,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {"micro_batches": micro_batches, "pipeline": pipeline, "chunks": chunks, "stages": stages, "weights": weights}
        given |= {"silence": silence, "patience": patience}
        self._threads: Optional[_Threads] = None
        if devices is None:
            super().__init__(model, optimizer, memory=memory, mesh=mesh, ranks=ranks, **given, **options)
            self.modules: Sequence[torch.nn.Module] = [self.module]
        else:
            _check_options(mesh, ranks, options)
            self._begin_here(model_of(model), optimizer, _gpus_of(devices), size_of(memory, "memory"), given | options)

    def _begin_here(
        self, model: torch.nn.Module, optimizer: Settings, gpus: Sequence[torch.device], memory: int, given: Mapping[str, Any]
    ) -> None:
        """Makes the stages that are threads of this process."""
        count, names = len(gpus), list(model.state_dict())
        share = _share_of_memory(model, memory, count)
        given = {**given, "memory": share, "mesh": None, **_shares_of_disk(given.get("disk"), count), **_groups_kept(given.get("param_groups"))}
        threads = _Threads(gpus, given["silence"], given["patience"])
        copies: list[_Copies] = [{} for _ in gpus]
        for of_stage in copies if count > 1 else ():
            _copy_of(model, of_stage)
        made: dict[int, Stage] = {}

        def begin(stage: int) -> None:
            own = {**given, "device": f"cuda:{gpus[stage].index}", "ranks": threads.joined[stage]}
            made[stage] = _StageHere(model, copies[stage], threads.baton, gpus, memory, optimizer, **own)

        try:
            threads.all(begin)
        except BaseException as error:
            if len(made) == count:  # after Ctrl-C
                threads.all(lambda stage: made[stage].close())
            threads.close()
            if isinstance(error, BudgetError):
                raise BudgetError(
                    f"{error}. This is of one of {count} stages, which share the memory of this process: each may have {share >> 20} MiB, what it "
                    f"holds already included, and for one more MiB of each state {count} more"
                ) from error
            raise
        self._threads, self._names, self._closed, self._every = threads, names, False, [made[stage] for stage in range(count)]
        self.module, self.modules = model, [stage.module for stage in self._every]
        self.micro_batches = self._every[0].micro_batches
        self.stage, self.stages, self.data_rank, self.data_ranks = 0, count, 0, 1
        self.optimizer = _OptimizerOfStages(self._every, threads, model)
        if count > 1:
            vars(model)[PIPELINE] = self
            override(model, "_call_impl", _refuse_call)
            override(model, "load_state_dict", functools.partial(_load_whole, model))
            if callable(getattr(model, "save_pretrained", None)):
                override(model, "save_pretrained", refuse_to_save)

    def _all(self, call: Callable[..., T], *given: Any) -> list[T]:
        """Has the stages of this process do something: itself, or each in its thread."""
        if self._threads is None:
            return [call(self, *given)]
        self._check_open()
        return self._threads.all(lambda stage: call(self._every[stage], *given))

    def _awaited(self, batch: Any) -> Any:
        """The same batch, after what the caller has queued on a GPU, whose stages have streams of their own if they are threads."""
        if self._threads is not None:
            mapped(batch, _wait_for)
        return batch

    # ---- what each stage does ----

    def train_step(self, batch: Any, loss_fn: Optional[Loss] = None, *, clip: Optional[float] = None) -> torch.Tensor:
        with contextlib.nullcontext() if self._threads is None else handlers_later():
            return super().train_step(batch, loss_fn, clip=clip)

    def forward_backward(self, batch: Any, loss_fn: Optional[Loss] = None) -> torch.Tensor:
        return self._all(Stage.forward_backward, self._awaited(batch), loss_fn)[0]

    def evaluate(self, batch: Any, loss_fn: Optional[Loss] = None) -> torch.Tensor:
        return self._all(Stage.evaluate, self._awaited(batch), loss_fn)[0]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return self._all(Stage.clip_grad_norm_, max_norm)[0]

    def state_dict(self) -> dict[str, Any]:
        if self._threads is None:
            return super().state_dict()
        found: dict[str, Any] = {}
        for own in self._all(Stage.state_dict):
            found = own | found  # a buffer beside the layers is stage 0's
        return {name: found[name] for name in self._names}

    def save(self, folder: Path, keep: int = 0, files: Optional[Mapping[str, Sequence[Any]]] = None) -> str:
        self._check_open()
        if self._threads is not None:
            self.optimizer._settings()  # of which all stages get to know
        return self._all(Stage.save, folder, keep, files)[0]

    def load(self, path: Path) -> None:
        self._all(Stage.load, path)
        if isinstance(self.optimizer, _OptimizerOfStages):
            self.optimizer.ask()

    def close(self, *, values: bool = True) -> None:
        if self._threads is None:
            super().close(values=values)
        elif not self._closed:
            self._all(functools.partial(Stage.close, values=values))
            restore(self.module)
            vars(self.module).pop(PIPELINE, None)
            self._closed = True
            self._threads.close()

    def _tell(self, error: BaseException) -> None:
        if self._threads is None:
            super()._tell(error)


def _wait_for(t: torch.Tensor) -> None:
    if t.is_cuda:
        torch.cuda.current_stream(t.device).synchronize()


def _load_whole(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    with full_parameters(model):
        return type(model).load_state_dict(model, *args, **kwargs)


def _refuse_call(*_: Any, **__: Any) -> NoReturn:
    raise StateError(
        "a model is called whose layers are the stages of a Pipeline, on several devices: train_step(), forward_backward() and evaluate() of "
        "the Pipeline call it. To generate, load the checkpoint into a model that is wrapped whole"
    )


def _check_options(mesh: Any, ranks: Which, options: Mapping[str, Any]) -> None:
    if (size := size_and_rank(ranks)[0]) > 1:
        raise InvalidArgumentError(
            f"devices is given, which is for one process that has all stages, and this one is one of {size} ranks: leave devices out, so that each "
            "rank is a stage (device='cuda'), or start the script by itself, without torchrun"
        )
    for name, value in (("mesh", mesh), ("device", options.get("device"))):
        if value is not None:
            raise InvalidArgumentError(
                f"{name} is {value!r:.80}, and devices is given, which has a GPU for each stage: leave {name} out. For several pipelines along "
                "data each stage is a process of its own (torchrun)"
            )


def _gpus_of(devices: Any) -> list[torch.device]:
    """The GPUs of the stages."""
    given = list(devices) if isinstance(devices, (list, tuple)) else []
    found: list[torch.device] = []
    for each in given:
        with contextlib.suppress(RuntimeError, TypeError):
            found.append(torch.device(each))
    if not given or len(found) < len(given) or any(each.type != "cuda" or each.index is None for each in found):
        raise InvalidArgumentError(
            f"devices is {devices!r:.80}; it is a list of the GPUs of the stages by their numbers, as ['cuda:0', 'cuda:1']. On the CPU stages of "
            "one process would not be faster than one: wrap() the model, or start a process for each stage with torchrun"
        )
    seen = gpus_seen()
    if (most := max(each.index for each in found)) >= seen:
        raise InvalidArgumentError(
            f"devices has 'cuda:{most}', and this process sees {seen} GPUs; give their numbers from 0, and look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )
    return found


def _share_of_memory(model: torch.nn.Module, memory: int, count: int) -> int:
    """The budget of a stage, which counts what the process has now, but not the model. The rest is divided."""
    own = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    has = max(0, resident_bytes() - own)
    return has + (memory - has) // count if memory > has else memory


def _shares_of_disk(disk: Any, count: int) -> dict[str, Any]:
    if disk is None:
        return {}
    return {"disk": [each if each.limit is None else Folder(each.path, size_of(each.limit, "disk") // count) for each in folders_of(disk)]}


def _groups_kept(groups: Any) -> dict[str, Any]:
    """Parameter groups that each stage can go through."""
    if groups is None:
        return {}
    kept = [{**each, "params": _listed(each["params"])} if isinstance(each, Mapping) and "params" in each else each for each in groups]
    return {"param_groups": kept}


def _listed(members: Any) -> Any:
    return members if isinstance(members, (str, torch.Tensor)) else list(members)
