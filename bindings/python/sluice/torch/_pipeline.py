"""Pipelines: a model that is cut by its layers over ranks, each of which wraps its own part."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Optional

import torch

from .._make import text
from ..errors import Error, InvalidArgumentError, NotFiniteError, StateError
from ..model import Path, Size, whole
from ..optimizers import Optimizer as Settings
from ..ranks import MOST_EXCHANGED, Message, Ranks
from ._borders import Border, Kind
from ._calls import calls_with
from ._engine import saved_buffers
from ._estimate import autocast_types
from ._gpu import CPU
from ._gradients import is_there, norms_of
from ._measures import Keeper, Ready
from ._modes import mapped, parts_of
from ._optimizer import Optimizer
from ._order import Action, actions_of, calls_in_flight
from ._prepare import Prepared, prepare
from ._safetensors import InFiles
from ._split_backward import Halves, Left
from ._stages import IDS, Blocks, Cut, Lookups, Passage, Table, blocks_of, model_of
from ._together import Which, together
from ._units import bytes_in_memory
from ._weights import stored_of
from ._wrap import check_alike, close, engine_of, move_in, session_of

Loss = Callable[[Any, Any], torch.Tensor]

_ORDERS = ("1f1b", "gpipe", "zb-h1")
_MOST_CHUNKS = 1024
_OF_ALL_BLOCKS = ("output_hidden_states", "output_attentions", "output_router_logits")  # what transformers' models are asked for
_REFUSED = {
    "accumulate": "micro_batches says how many there are",
    "update_in_backward": "gradients are added up over the micro-batches",
    "sum_gradients": "each rank adds up those of its stage over the micro-batches before they are summed along data",
    "sample_batch": "each stage is called with what the one before gives; state reserve=..., or leave it to be found",
}


class Stage:
    """A rank's stage of a Pipeline, with its arguments, functions and attributes: it wraps and trains that part of the model alone."""

    def __init__(
        self,
        model: Any,
        optimizer: Settings,
        *,
        memory: Size,
        micro_batches: int,
        pipeline: str,
        chunks: int,
        stages: Optional[str],
        mesh: Optional[str],
        weights: Optional[Path],
        ranks: Which,
        silence: float,
        patience: float,
        **options: Any,
    ) -> None:
        _check(optimizer, micro_batches, pipeline, chunks, mesh, options)
        self.micro_batches, self._closed = micro_batches, False
        model, ready = model_of(model), Ready()
        with together(ranks, silence, patience) as others:
            self._others, self._ranks = others, others.ranks
            mesh = f"pipeline={others.size}" if mesh is None else mesh
            self._of_stage, self._of_pipeline = (others.along(text(mesh, "mesh").decode(), axis) for axis in ("data", "pipeline"))
            self.data_rank, self.data_ranks = self._of_stage.rank, self._of_stage.size
            self.stage, self.stages = self._of_pipeline.rank, self._of_pipeline.size
            told = [json.loads(place) for place in self._told("the mesh", json.dumps([mesh, self.data_rank]).encode())]
            self._compare("the meshes", [given.encode() for given, _ in told], f"it is {mesh!r} here")
            self._pipelines = [data for _, data in told]
            along = self._of_pipeline.ranks

            def planned() -> tuple[Blocks, Optional[Cut], Prepared, Mapping[str, InFiles]]:
                _check_chunks(chunks, stages, self.stages)
                if self.stages > 1:
                    _check_outputs(model, {})
                blocks = blocks_of(model)
                cut = None if along is None else self._cut_model(model, blocks, along, pipeline, micro_batches, chunks, stages)
                counted = {"accumulate": micro_batches * self.data_ranks} if options.get("reproducible") else {}
                prepared = prepare(model, optimizer, memory=memory, together=self._of_stage, cut=cut, **{**options, **counted})
                return blocks, cut, prepared._replace(counts_passes=False), {} if weights is None else stored_of(model, weights)

            with ready.phase("planning"):
                blocks, self._cut_of, prepared, stored = others.agreed(planned)
                alike = {"micro_batches": micro_batches, "pipeline": pipeline, "chunks": chunks, "stages": stages}
                check_alike(model, prepared, stored, others, **alike)
            self._chunks, self._actions = chunks, actions_of(pipeline, self.stages, chunks, micro_batches, self.stage)
            self._of_transformers = blocks.of_transformers
            self._parameters = [(name, p.dtype) for name, p in model.named_parameters()]
            self._owners = _owners(model, self._cut_of)
            self._is_reproducible = prepared.options.reproducible
            self._device = CPU if prepared.gpu is None else prepared.gpu.device
            buffers = list(saved_buffers(model))
            self.module, self.optimizer = self._moved_in(model, prepared, stored, ready)
        if self._ranks is not None:
            self.optimizer.register_step_pre_hook(self._check_step)
        if self._cut_of is not None:
            # It has no reference to this object: Python's collector does not see that the model's memory refers to the engine.
            session_of(self.module).engine.buffers_of_all = (buffers, functools.partial(_gathered, self._cut_of.ranks, self.data_rank))
            of_module = vars(self.module)  # what wrapping has made there closing unmakes
            of_module["_call_impl"] = functools.partial(_of_pipeline_alone, self._cut_of.passage, of_module["_call_impl"])
            if "save_pretrained" in of_module:
                of_module["save_pretrained"] = refuse_to_save
        self._in_flight_of: Any = None  # for which shapes and states it is known what calls keep
        self._kinds: dict[Any, list[Optional[list[Kind]]]] = {}  # of what passes each border, by shapes and stages' states

    # ---- what is otherwise where stages are threads of one process ----

    def _cut_model(self, *given: Any) -> Cut:
        """The cut of a model. given: the arguments of Cut."""
        return Cut(*given)

    def _given_back(self, prepared: Prepared) -> int:
        """The bytes of the model that this process gives back."""
        return bytes_in_memory(prepared.groups)  # without what other stages had

    def _agree(self) -> None:
        """Comes when the model has moved in, which may still be undone."""

    @property
    def _places(self) -> Sequence[torch.device]:
        """Where batches may be."""
        return [CPU] if self._device == CPU else [CPU, self._device]

    def _digest(self, batch: Any) -> bytes:
        """Returns a digest that tells a batch from others."""
        digest = hashlib.sha256()
        mapped(batch, lambda t: digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data))
        return digest.digest()

    # ---- making it ----

    def _moved_in(
        self, model: torch.nn.Module, prepared: Prepared, stored: Mapping[str, InFiles], ready: Ready
    ) -> tuple[torch.nn.Module, Optimizer]:
        """Wraps this stage's part, and drops the rest."""
        if (cut := self._cut_of) is not None:
            cut.keep_own(stored)
            prepared = prepared._replace(options=dataclasses.replace(prepared.options, given_back=self._given_back(prepared)))
            Keeper(prepared.memory, 0).give_back()
        with self._others.random_of_rank_0(prepared.gpu):
            module, optimizer = move_in(model, prepared, stored, self._of_stage, ready, self._agree)
        if cut is not None:
            cut.forget_others()
            if isinstance(cut.lookups, Table):
                cut.lookups.adds_once = prepared.options.reproducible
                if prepared.gpu is not None:
                    cut.lookups.calls = calls_with(module, cut.lookups.weight)
        self._in_flight = session_of(module).demand.in_flight
        self._in_flight.calls = calls_in_flight(self._actions, self._chunks)
        if self.stages > 1 and any(what == "weights" for what, _, _ in self._actions):
            self._in_flight.halves = Halves(module)
        assert optimizer is not None, "it trains"
        return module, optimizer

    # ---- training ----

    def train_step(self, batch: Any, loss_fn: Optional[Loss] = None, *, clip: Optional[float] = None) -> torch.Tensor:
        """Trains a step, and returns its loss. It is forward_backward(), clip_grad_norm_(clip), optimizer.step() and
        optimizer.zero_grad()."""
        loss = self.forward_backward(batch, loss_fn)
        if clip is not None:
            self.clip_grad_norm_(clip)
        with self._failing():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def forward_backward(self, batch: Any, loss_fn: Optional[Loss] = None) -> torch.Tensor:
        """Adds the gradients of a batch to the stages' parameters: where batches differ along "data", their mean, as with DDP. Returns the
        mean of all micro-batches' losses, on all ranks, as a tensor on the CPU.

        batch: a pair of inputs, with which the first layer is called, and targets; of a model of transformers, the dict with which it is
            called. Tensors in it are cut along their first dimension, and each micro-batch has all else. All stages give the same, and ranks
            along "data" their own. Tensors are on the CPU, or on the stage's GPU, to which what it needs of a micro-batch goes otherwise.
        loss_fn: is called with the last layer's output and the targets, or with the model's output and the dict. None, of a model of
            transformers: the loss that it has of its labels.
        """
        return self._run(self._actions, batch, loss_fn)

    def evaluate(self, batch: Any, loss_fn: Optional[Loss] = None) -> torch.Tensor:
        """Returns a batch's loss, as forward_backward() does, without gradients. `pipe.module.eval()` and `train()` set what the layers do
        differently."""
        forward = [action for action in self._actions if action[0] in ("receive_input", "forward", "send_output")]
        with torch.no_grad():
            return self._run(forward, batch, loss_fn)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_(), of all stages' gradients. Returns their norm."""
        self._check_open()
        what = "the norms to which gradients are clipped"
        self._compare(what, self._told(what, struct.pack("d", max_norm)), f"max_norm is {max_norm!r} here")
        with self._failing():
            own = dict(self.module.named_parameters())
            there = {name: p.grad for name, p in own.items() if p.grad is not None}
            every = self._norms(dict(zip(there, norms_of(list(there.values())), strict=True)))
            by_type: dict[torch.dtype, list[torch.Tensor]] = {}
            for name, dtype in self._parameters:
                if name in every:
                    by_type.setdefault(dtype, []).append(torch.tensor(every[name], dtype=dtype, device="cpu"))
            found = [norm for of_type in by_type.values() for norm in of_type]  # as torch.nn.utils groups them
            total = torch.linalg.vector_norm(torch.stack(found)) if found else torch.tensor(0.0)
            torch.nn.utils.clip_grads_with_norm_(own.values(), max_norm, total)
        return torch.as_tensor(total)

    # ---- what is saved ----

    def state_dict(self) -> dict[str, Any]:
        """The parameters and buffers of this stage, under their names in the whole model."""
        return self.module.state_dict()

    def save(self, folder: Path, keep: int = 0, files: Optional[Mapping[str, Sequence[Any]]] = None) -> str:
        """Writes a checkpoint of the whole model, its buffers, and the optimizer's state and settings, into a folder that all ranks see,
        as engine_of(model).save() does, with rank 0's `files`. Any number of stages can load it, and a model that is wrapped whole."""
        self._check_open()
        return engine_of(self.module).save(folder, keep, files)

    def load(self, path: Path) -> None:
        """Loads what save() wrote, or engine_of(model).save() of the model that is wrapped whole."""
        self._check_open()
        self._others.agreed(lambda: engine_of(self.module).load(path), "loading a checkpoint")

    def close(self, *, values: bool = True) -> None:
        """Leaves this stage's layers plain modules, as sluice.torch.close() does. Nothing happens where it was closed before."""
        if not self._closed:
            close(self.module, values=values)
            if self._cut_of is not None:
                self._cut_of.close()
            self._closed = True
            self._of_pipeline.close()
            self._others.close()

    # ---- inside ----

    def _calling(self, chunk: int) -> AbstractContextManager[None]:
        """A `with` in which this stage's part of the model is called for a chunk."""
        return contextlib.nullcontext() if self._cut_of is None else self._cut_of.passage.calling(chunk)

    def _run(self, actions: Sequence[Action], batch: Any, loss_fn: Optional[Loss]) -> torch.Tensor:
        """Does what this stage does for a batch. Returns the loss, on all ranks."""
        self._check_open()
        parts, rows, shapes = self._others.agreed(lambda: self._cut(batch, loss_fn, actions is self._actions), "the batch of a pipeline")
        states = self._check_alike(batch, rows)
        with self._failing():
            known = shapes, states  # of what passes between the stages
            if known != self._in_flight_of:
                self._in_flight_of = known
                self._in_flight.known.clear()
            step = _Step(self, parts, loss_fn, self._kinds.get(known, []))
            try:
                step.begin()
                for what, item, chunk in actions:
                    getattr(step, what)(item, chunk)
                step.end()
            except BaseException as error:
                self._tell(error)  # before the messages are awaited
                step.drain()
                raise
            self._kinds[known] = step.kinds()
            return self._shared(step.losses)

    def _cut(self, batch: Any, loss_fn: Any, trains: bool) -> tuple[list[tuple[Any, Any]], int, str]:
        """The micro-batches, as inputs and targets, the rows of each, and the shapes of the batch."""
        if trains and not torch.is_grad_enabled():
            raise StateError("gradients are off (torch.no_grad()), and the pipeline is to train; turn them on, or call evaluate()")
        fits = isinstance(batch, Mapping) if self._of_transformers else isinstance(batch, (tuple, list)) and len(batch) == 2
        if not fits:
            needed = "a dict, as a model of transformers is called with," if self._of_transformers else "a pair of inputs and targets"
            raise InvalidArgumentError(f"the batch is a {type(batch).__name__}; {needed} is needed")
        if trains and self._is_reproducible and any(map(is_there, self.module.parameters())):
            raise StateError(
                "gradients of a step are there already, and those that are reproducible are added up over the micro-batches of one batch: call "
                "optimizer.zero_grad() before, after the optimizer.step() that applies them, or give all micro-batches at once"
            )
        batch = (dict(batch), None) if self._of_transformers else batch
        if self._of_transformers and self.stages > 1:
            _check_outputs(self.module, batch[0])
        is_tied = self._cut_of is not None and self._cut_of.tied is not None
        if is_tied and not isinstance(batch[0].get(IDS), torch.Tensor):
            raise InvalidArgumentError(
                f"the batch has no {IDS}, which the last stage looks up for the first one, since head and embedding share a table"
            )
        if loss_fn is None and not (self._of_transformers and "labels" in batch[0]):
            raise InvalidArgumentError("there is no loss: give loss_fn, or, to a model of transformers, labels in the batch")
        shapes: list[Any] = []
        mapped(batch, lambda t: shapes.append((str(t.dtype), tuple(t.shape))))
        mapped(batch, self._check_place)
        sizes = {shape[0] for _, shape in shapes if shape}
        if len(sizes) != 1 or (size := sizes.pop()) % self.micro_batches or not size:
            raise InvalidArgumentError(
                f"the batch has tensors of {shapes}, and is cut along the first dimension into {self.micro_batches} micro-batches: it is "
                "to be the same in all of them, and a multiple of micro_batches (DataLoader(drop_last=True) leaves out a smaller last batch)"
            )
        if self.micro_batches > 1:
            _check_cut(batch, size)
        count = size // self.micro_batches

        def part(number: int) -> tuple[Any, Any]:
            inputs, targets = mapped(batch, lambda t: t.narrow(0, number * count, count) if t.dim() else t)
            return inputs, targets

        return [part(number) for number in range(self.micro_batches)], count, repr(shapes)

    def _check_place(self, t: torch.Tensor) -> None:
        if t.device not in self._places:
            others = "".join(f", or on {place}" for place in self._places[1:])
            there = f"{others}, where this stage computes" if others else ""
            raise InvalidArgumentError(f"the batch has a tensor on {t.device}; give it on the CPU{there}")

    def _here(self, value: Any) -> Any:
        """A part of a batch, where this stage computes. (Copies from registered memory have ended when the step has.)"""
        return mapped(value, lambda t: t.to(self._device, non_blocking=True))

    def _check_alike(self, batch: Any, rows: int) -> tuple[bytes, ...]:
        """Compares the batch, and whether it trains. rows: of each micro-batch. Returns each rank's state, on which depends what passes
        between stages."""
        trained = [p.requires_grad for p in self.module.parameters()]
        state = [self.module.training, torch.is_grad_enabled(), autocast_types(), trained]
        own = self._digest(batch) + hashlib.sha256(repr(state).encode()).digest()
        told = self._told("the values of the batch", struct.pack("=?Q", torch.is_grad_enabled(), rows) + own)
        does = "trains" if torch.is_grad_enabled() else "evaluates"
        self._compare("the calls", [each[:1] for each in told], f"this rank {does}")
        self._compare("the values of the batch", [each[9:41] for each in told], "all stages of a pipeline have one", of_pipeline=True)
        if self._is_reproducible and torch.is_grad_enabled():  # a row of a smaller share would count for more
            self._compare("the shares of a reproducible step's batch", [each[1:9] for each in told], f"micro-batches have {rows} rows here")
        return tuple(each[41:] for each in told)

    def _check_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Comes before a step, in which the ranks would else wait for one that is in another call. A stage may have no gradients, as where
        its layers are frozen for some steps."""
        settings = [{name: given for name, given in group.items() if name != "params"} for group in optimizer.param_groups]
        own, what = repr(mapped(settings, torch.Tensor.cpu)), "the settings of the optimizer"
        closure = next(iter(args[1:]), kwargs.get("closure"))  # which makes gradients later
        has = closure is not None or any(p.grad is not None for p in self.module.parameters())
        told = self._told(what, hashlib.sha256(own.encode()).digest() + struct.pack("?", has))
        self._compare(what, [each[:-1] for each in told], f"its groups have {own:.200} here")
        if not any(each[-1] for each in told):
            raise StateError("optimizer.step() is called, and no parameter of any stage has a gradient; call forward_backward() before")

    def _told(self, what: str, own: bytes) -> list[bytes]:
        """Exchanges bytes with all ranks, and returns those of each."""
        return [own] if self._ranks is None else self._ranks.exchange(what, own)

    def _compare(self, what: str, told: Sequence[bytes], here: str, of_pipeline: bool = False) -> None:
        """Raises InvalidArgumentError, on all ranks, where ranks differ in what they have told; of_pipeline: the stages of one."""
        first: dict[int, int] = {}  # by pipeline
        for rank, value in enumerate(told):
            other = first.setdefault(self._pipelines[rank] if of_pipeline else 0, rank)
            if value != told[other]:
                raise InvalidArgumentError(f"{what} differ on rank {rank} and rank {other}: {here}; give them the same")

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(
                f"the Pipeline was closed, and its {type(self.module).__name__} is a plain module; make another Pipeline of the whole model"
            )

    def _shared(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean of the last stages' losses, on all ranks."""
        if losses and not self._is_reproducible:
            losses = [functools.reduce(torch.add, losses)]
        values = [loss.item() for loss in losses]
        own = str(losses[0].dtype).removeprefix("torch.").encode() + b" " + struct.pack(f"{len(values)}d", *values) if losses else b""
        most = 8 * self.micro_batches + len("bfloat16 ")
        found = [own] if self._ranks is None else _exchanged(self._ranks, "the loss of a step", own, most)
        told = [each.split(b" ", 1) for each in found if each]
        every = [value for _, of_pipeline in told for (value,) in struct.iter_unpack("d", of_pipeline)]
        return torch.tensor(sum(every) / len(every), dtype=getattr(torch, told[0][0].decode()), device="cpu")

    def _norms(self, own: Mapping[str, float]) -> dict[str, float]:
        """All stages' norms, of gradients that there are."""
        if self._of_pipeline.ranks is None:
            return dict(own)
        every: dict[str, float] = {}
        mine = [own.get(name, -1.0) for name in self._owners[self.stage]]
        most = 8 * max(map(len, self._owners))
        told = _exchanged(self._of_pipeline.ranks, "the norms of gradients", struct.pack(f"{len(mine)}d", *mine), most)
        for names, norms in zip(self._owners, told, strict=True):
            every.update(zip(names, struct.unpack(f"{len(names)}d", norms), strict=True))
        return {name: norm for name, norm in every.items() if norm >= 0 or math.isnan(norm)}

    def _tell(self, error: BaseException) -> None:
        if self._ranks is not None:
            with contextlib.suppress(Error):
                data = f"data {self.data_rank} of {self.data_ranks}, " if self.data_ranks > 1 else ""
                self._ranks.fail(f"{data}stage {self.stage} of {self.stages}: {type(error).__name__}: {error}"[:4000])

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Lets an error of this rank end the work of all, which would wait for it; but for one that all have."""
        try:
            yield
        except NotFiniteError:
            raise
        except BaseException as error:
            self._tell(error)
            raise


class _Step:
    """Carries out this stage's actions in a step. Its functions have the names of actions."""

    def __init__(
        self,
        pipe: Stage,
        parts: Sequence[tuple[Any, Any]],
        loss_fn: Optional[Loss],
        kinds: Sequence[Optional[list[Kind]]],
    ) -> None:
        """kinds: of the values that pass each border, where they are known."""
        self._pipe, self._parts, self._loss_fn = pipe, parts, loss_fn
        session = session_of(pipe.module)
        self._add_event, self._set_micro_batch, self._complete = session.engine.add_event, session.set_micro_batch, session.complete
        # Of reproducible gradients the engine takes the mean, over the micro-batches of all pipelines.
        self._divisor = 1 if pipe._is_reproducible else pipe.micro_batches
        self._borders: list[Border] = []
        stage, stages, last = pipe.stage, pipe.stages, pipe.stages * pipe._chunks - 1
        # By chunk: the border before it and after it.
        own = range(stage, last + 1, stages)
        self._before = [None if number == 0 else self._border((stage - 1) % stages, f" (border {number})", kinds) for number in own]
        self._after = [None if number == last else self._border((stage + 1) % stages, f" (border {number + 1})", kinds) for number in own]
        self._lookups = Lookups() if pipe._cut_of is None else pipe._cut_of.lookups
        if self._lookups.are_made:
            ids = [pipe._here(inputs[IDS]) for inputs, _ in parts]
            assert pipe._cut_of is not None, "there are other stages"
            border = self._border(stages - 1 - stage, " (of a shared table)", kinds, pipe._cut_of.lags.looked_up)
            pipe._in_flight.bytes = self._lookups.begin(border, ids, self._set_micro_batch)
        self._outputs: dict[tuple[int, int], Any] = {}  # by item and chunk
        self._came: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # gradients of what was received, by item and chunk, and tensor
        self._left: dict[int, Left] = {}  # for gradients of weights, by item
        self.losses: list[torch.Tensor] = []  # of the micro-batches, where this is the last stage

    def _border(self, other: int, place: str, kinds: Sequence[Optional[list[Kind]]], sent: Optional[int] = None) -> Border:
        """sent: of which messages in one direction may be under way, where it is not as between stages that follow each other."""
        number, ranks, cut = len(self._borders), self._pipe._of_pipeline.ranks, self._pipe._cut_of
        assert ranks is not None and cut is not None, "there are other stages"
        known = kinds[number] if kinds else None
        self._borders.append(Border(ranks, other, known, self._pipe._device, place, cut.lags.sent if sent is None else sent, self._add_event))
        return self._borders[-1]

    def begin(self) -> None:
        if (halves := self._pipe._in_flight.halves) is not None:
            halves.begin_step()
        self._lookups.begin_messages()

    def receive_input(self, item: int, chunk: int) -> None:
        self._received(chunk).begin_value(item)

    def forward(self, item: int, chunk: int) -> None:
        value: tuple[Any, ...] = ()
        if self._before[chunk] is not None:
            came = self._came[item, chunk] = {}
            value = (self._received(chunk).value(item, came.__setitem__),)
        looks_up = chunk == self._lookups.chunk
        if looks_up:
            self._lookups.item = item
        begin, halves = time.monotonic_ns(), self._pipe._in_flight.halves
        with contextlib.nullcontext() if halves is None else halves.calling():
            self._outputs[item, chunk] = self._called(chunk, value, *self._parts[item])
        self._passed("forward", item, chunk, begin)
        if looks_up:
            self._lookups.after_forward(item)

    def _called(self, chunk: int, value: tuple[Any, ...], inputs: Any, targets: Any) -> Any:
        """Returns the output of a chunk: the loss, where it is the last one."""
        ends = self._after[chunk] is None
        self._pipe._in_flight.part = chunk
        if self._pipe._of_transformers:
            named = self._pipe._here({k: v for k, v in inputs.items() if ends or k != "labels"})
            with self._pipe._calling(chunk):
                output = self._pipe.module(*value, **{"use_cache": False, **named})
            targets = named
        else:
            with self._pipe._calling(chunk):
                output = self._pipe.module(*value or (self._pipe._here(inputs),))
        if not ends:
            return output
        loss = output.loss if self._loss_fn is None else self._loss_fn(output, self._pipe._here(targets))
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise InvalidArgumentError(f"loss_fn returned {loss!r:.80}; a tensor without dimensions is needed")
        loss = loss / self._divisor
        self.losses.append(loss.detach().clone())
        return loss

    def send_output(self, item: int, chunk: int) -> None:
        after = self._sent(chunk)
        tensors = after.send(item, self._outputs.pop((item, chunk)))
        if torch.is_grad_enabled():
            self._outputs[item, chunk] = tensors
        else:
            after.limit_sent(item)

    def receive_gradient(self, item: int, chunk: int) -> None:
        self._sent(chunk).begin_gradients(item)

    def backward(self, item: int, chunk: int) -> None:
        output = self._outputs.pop((item, chunk))
        after = self._after[chunk]
        gradients = [] if after is None else after.gradients(item)
        begin, halves = time.monotonic_ns(), self._pipe._in_flight.halves
        self._set_micro_batch(item)
        with contextlib.nullcontext() if halves is None else halves.leaving() as left:
            if after is None:
                output.backward()
            else:
                pairs = [(t, g) for t, g in zip((t for t in output if t.requires_grad), gradients, strict=True) if g is not None]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        if left is not None:
            self._left[item] = left
        self._passed("backward", item, chunk, begin)
        if chunk == self._lookups.chunk:
            self._lookups.after_backward(item)

    def weights(self, item: int, chunk: int) -> None:
        if (left := self._left.pop(item, None)) is None:
            return  # a pipeline of one stage has computed these gradients in its backward pass
        begin = time.monotonic_ns()
        self._set_micro_batch(item)
        left.finish()
        self._passed("gradients of weights", item, chunk, begin)

    def _passed(self, what: str, item: int, chunk: int, begin: int) -> None:
        """Adds to the trace a pass that ends now."""
        of_chunk = f" in chunk {chunk}" if self._pipe._chunks > 1 else ""
        self._add_event("compute", f"{what} of micro-batch {item}{of_chunk}", begin)

    def send_gradient(self, item: int, chunk: int) -> None:
        self._received(chunk).send_gradients(item, self._came.pop((item, chunk)))

    def _received(self, chunk: int) -> Border:
        """The border over which a chunk receives values."""
        border = self._before[chunk]
        assert border is not None, "it is not the first one"
        return border

    def _sent(self, chunk: int) -> Border:
        """The border over which a chunk sends values."""
        border = self._after[chunk]
        assert border is not None, "it is not the last one"
        return border

    def end(self) -> None:
        self._lookups.end()
        for border in self._borders:
            border.end()
        if torch.is_grad_enabled():
            self._set_micro_batch(self._pipe.micro_batches)
            self._complete()

    def drain(self) -> None:
        for border in self._borders:
            border.drain()
        self._lookups.drop()

    def kinds(self) -> list[Optional[list[Kind]]]:
        return [border.kinds for border in self._borders]


def _check(optimizer: Any, micro_batches: Any, pipeline: Any, chunks: Any, mesh: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(optimizer, Settings):
        raise InvalidArgumentError(f"the optimizer is {optimizer!r:.80}; a pipeline trains, by one such as sluice.AdamW()")
    if whole(micro_batches, "micro_batches") < 1:
        raise InvalidArgumentError("micro_batches is 0; a batch is cut into one at least")
    if pipeline not in _ORDERS:
        raise InvalidArgumentError(f"pipeline is {pipeline!r}; it is one of {', '.join(map(repr, _ORDERS))}")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not 1 <= chunks <= _MOST_CHUNKS:
        raise InvalidArgumentError(
            f"chunks is {chunks!r:.80}; it is how many chunks of layers each stage has, a whole number from 1 to {_MOST_CHUNKS}"
        )
    for name, why in _REFUSED.items():
        if options.get(name) not in (None, False, "step"):
            raise InvalidArgumentError(f"{name} is given to a Pipeline: {why}; leave it out")
    if isinstance(device := options.get("device"), (list, tuple)):
        raise InvalidArgumentError(
            f"device is {device!r:.80}; a list is given as devices, where this process has all stages. Where each is a process of its own, give "
            f"device='cuda', and start as many as there are stages (torchrun --nproc-per-node {len(device)})"
        )
    for axis in ("tensor", "sequence"):
        if isinstance(mesh, str) and f"{axis}=" in mesh:
            raise InvalidArgumentError(
                f"the mesh {mesh!r} has an axis {axis!r}, along which layers of native models are cut (sluice train --mesh); a Pipeline "
                "may have data and pipeline"
            )


def _check_outputs(model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
    for name in _OF_ALL_BLOCKS:
        if batch.get(name, getattr(getattr(model, "config", None), name, False)):
            raise InvalidArgumentError(
                f"{name} is set, in the batch or the model's config, and asks for what all blocks give, of which this stage has some alone"
            )


def _check_cut(batch: Any, rows: int) -> None:
    """Refuses what is not cut, and has a value for each row: each micro-batch would have the values of all rows."""
    parts = parts_of(batch)
    is_array = not isinstance(batch, torch.Tensor) and hasattr(batch, "__array__") and len(getattr(batch, "shape", ())) > 0
    if is_array or (isinstance(batch, (list, tuple)) and len(batch) == rows and all(isinstance(each, (int, float)) for each in batch)):
        what = f"a {type(batch).__name__}" + ("" if is_array else f" of {rows} numbers, which is how many rows it has")
        raise InvalidArgumentError(f"the batch has {what}, and tensors alone are cut into micro-batches; give it as a tensor")
    for part in parts or ():
        _check_cut(part, rows)


def _check_chunks(chunks: int, cut: Any, stages: int) -> None:
    """cut: the layers of each stage, as given."""
    if stages == 1 and (chunks > 1 or cut is not None):
        given = f"chunks is {chunks}, which is how many chunks of" if chunks > 1 else f"stages is {cut!r:.80}, which says which"
        raise InvalidArgumentError(
            f"{given} layers each stage of a pipeline has, and there is no pipeline: start more ranks (torchrun --nproc-per-node P), with "
            'mesh="pipeline=P" or without a mesh, or leave it out'
        )


def _exchanged(ranks: Ranks, what: str, own: bytes, most: int) -> list[bytes]:
    """Exchanges more bytes than ranks do at once. most: that one of them may give."""
    pieces = [ranks.exchange(what, own[first : first + MOST_EXCHANGED]) for first in range(0, most, MOST_EXCHANGED)]
    return [b"".join(of_rank) for of_rank in zip(*pieces, strict=True)]


def _owners(model: torch.nn.Module, cut: Optional[Cut]) -> list[list[str]]:
    """The names of each stage's parameters."""
    if cut is None:
        return [[name for name, _ in model.named_parameters()]]
    of_stages = [set().union(*cut.parameters[stage :: cut.count]) for stage in range(cut.count)]
    return [[name for name, p in model.named_parameters() if id(p) in own] for own in of_stages]


def _gathered(ranks: Ranks, data_rank: int, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All stages' buffers on rank 0, for a checkpoint; on the others their own. ranks: those of a pipeline."""
    if data_rank > 0:  # others tell of the same ones
        return own
    own = {name: buffer.cpu().contiguous() for name, buffer in own.items()}
    kinds = json.dumps([[name, *Kind.of(buffer)] for name, buffer in own.items()]).encode()
    lengths = ranks.exchange("buffers", struct.pack("Q", len(kinds)))
    if ranks.rank > 0:
        for t in (torch.frombuffer(bytearray(kinds), dtype=torch.uint8), *own.values()):
            _moved(ranks.send, 0, t)
        return own
    every = dict(own)
    for stage, length in enumerate(lengths[1:], 1):
        told = _moved(ranks.receive, stage, torch.empty(struct.unpack("Q", length), dtype=torch.uint8, device="cpu"))
        for name, *kind in json.loads(told.numpy().tobytes()):
            every.setdefault(name, _moved(ranks.receive, stage, Kind.told(*kind).empty()))
    return every


def _moved(way: Callable[[int, str, int, int], Message], other: int, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes:
        way(other, "a buffer", tensor.data_ptr(), tensor.nbytes).wait()
    return tensor


def _of_pipeline_alone(passage: Passage, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a stage's part of a model, where its pipeline does."""
    if passage.called is None:
        raise StateError(
            "one stage's part of a model is called, which needs what the stage before it gives: train_step(), forward_backward() and evaluate() "
            "of the Pipeline call all of it. To generate, load the checkpoint into a model that is wrapped whole"
        )
    return call(*args, **kwargs)


def refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise StateError(
        "save_pretrained() is called of one stage's part of a model; save() of the Pipeline writes a checkpoint of all of it, which a model "
        "that is wrapped whole can load"
    )
