"""How a model is cut into the stages of a pipeline: its blocks, what is before and after them, what each stage keeps of it, and a table that
embedding and head share."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .._handle import of_thread, text_of
from .._make import text
from ..errors import InvalidArgumentError
from ..ranks import Ranks
from ._borders import Border
from ._estimate import faked
from ._estimate_values import Values
from ._gpu import CPU
from ._homes import has_memory
from ._moving import DRAWN
from ._order import Lags, actions_of
from ._units import Group, find_units, has_children, name_apart

IDS = "input_ids"  # by which models of transformers know their tokens


class Stub(NamedTuple):
    """A stand-in for a module of another stage: it gives an output that the model's own code can use, of which no value counts."""

    width: int = 0  # of the output's last dimension; 0: the output is as the input
    dtype: Optional[torch.dtype] = None  # of the output then
    wider: bool = False  # whether that is one more dimension than the input has


class Blocks(NamedTuple):
    """A model's blocks, whose calls follow one another, and the modules with parameters that are called before and after them."""

    holder: str  # the name of the module whose children they are
    names: list[str]
    before: Mapping[str, Stub]
    after: Sequence[str]
    of_transformers: bool
    gives_tuples: bool = False  # whether a block returns a tuple


class Cut:
    """Which stage has what of a model. A stage has one chunk of consecutive blocks or several: the first chunks of all stages are numbered
    first, in the model's order, then the second ones."""

    def __init__(
        self, model: torch.nn.Module, blocks: Blocks, ranks: Ranks, order: str, items: int, chunks: int, stages: Optional[str]
    ) -> None:
        self.model, self.blocks, self.ranks, self.stage, self.count = model, blocks, ranks, ranks.rank, ranks.size
        self.chunks, self.last = chunks, chunks * ranks.size - 1
        self.own = range(self.stage, self.last + 1, self.count)  # the numbers of this stage's chunks
        self.tied = _tied_embedding(model, blocks.before, blocks.after)
        is_first = self.tied is not None and self.stage == 0
        # Where embedding and head share a table: Fetching on the first stage, and Table on the last one.
        self.lookups: Lookups = Fetching(_filler(blocks.before[self.tied or ""])) if is_first else Lookups()
        self.lags = Lags.of(actions_of(order, self.count, chunks, items, self.stage), self.count, chunks)
        work = [0.0, *(_elements(model, [name]) for name in self.blocks.names), _elements(model, self.blocks.after)]
        given = None if stages is None else text(stages, "stages")
        array = (ctypes.c_double * len(work))(*work)
        found = text_of("sluice_pipeline_stages", text(order, "pipeline"), self.count, chunks, items, given, array, len(work) - 2)
        # By the numbers of chunks.
        self.ranges: list[tuple[int, int]] = [(first, end) for first, end in json.loads(found)]
        self.names = [self._names_of(number) for number in range(self.last + 1)]
        self.parameters = [_tensors(model, names) for names in self.names]
        self._check()
        self._hooks: list[Any] = []
        self._hooks_of_table: dict[str, Any] = {}  # which the first stage calls
        self.passage = Passage(model, [Chunk(*self.ranges[number], number > 0, number < self.last) for number in self.own])

    def _names_of(self, number: int) -> list[str]:
        """The modules of a chunk."""
        first, end = self.ranges[number]
        before = [name for name in self.blocks.before if name != self.tied] if number == 0 else []
        after = [*self.blocks.after, *([] if self.tied is None else [self.tied])] if number == self.last else []
        return before + self.blocks.names[first:end] + after

    def _name_of(self, number: int) -> str:
        """A chunk, in words."""
        chunk, stage = divmod(number, self.count)
        return f"stage {stage}" if self.chunks == 1 else f"chunk {chunk} of stage {stage}"

    @property
    def _one(self) -> str:
        """Returns the name of the part that modules must share."""
        return "stage" if self.chunks == 1 else "chunk"

    def _check(self) -> None:
        owner: dict[int, tuple[int, str]] = {}
        for number, tensors in enumerate(self.parameters):
            for key, (name, _) in tensors.items():
                before, known_as = owner.setdefault(key, (number, name))
                if before != number:
                    raise InvalidArgumentError(
                        f"'{name}', which {self._name_of(number)} needs, is the same tensor as '{known_as}' of {self._name_of(before)}; cut "
                        f"the model so that one {self._one} has all that shares it (stages=...), or give each a tensor of its own"
                    )
        self._check_trained()
        for name, p in self.model.named_parameters():
            if id(p) not in owner:
                raise InvalidArgumentError(
                    f"'{name}' is in no block, and in no module that is called before or after them, so that no stage has it; move it "
                    "into one"
                )

    def _check_trained(self) -> None:
        with_elements = [
            [t for _, t in tensors.values() if isinstance(t, torch.nn.Parameter) and t.numel()] for tensors in self.parameters
        ]
        for stage in range(self.count):
            of_stage = slice(stage, None, self.count)
            if not any(p.requires_grad for own in with_elements[of_stage] for p in own):
                self._refuse_cut(f"stage {stage}", self.ranges[of_stage], ", and no parameter that is trained; each stage needs one")
        for number, own in enumerate(with_elements):
            if not own:
                self._refuse_cut(self._name_of(number), [self.ranges[number]], ", and no parameter; each chunk needs one")

    def _refuse_cut(self, which: str, ranges: Sequence[tuple[int, int]], lacks: str) -> NoReturn:
        blocks = " and ".join(f"{first} to {end - 1}" for first, end in ranges)
        fewer = "fewer ranks" if self.chunks == 1 else "fewer chunks or ranks"
        raise InvalidArgumentError(f"{which} has the blocks {blocks}{lacks}: state another cut (stages=...), or {fewer}")

    def groups(self, units: Optional[Mapping[str, list[str]]], by_calls: bool) -> list[list[Group]]:
        """The units of each chunk. units: the user's own, of which each is in one chunk; by_calls: see find_units()."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        of_chunks: list[dict[str, list[str]]] = [{} for _ in self.names]
        for unit, names in (units or {}).items():
            has = [any(_is_in(name, own) or _is_in(own, name) for name in names for own in of_chunk) for of_chunk in self.names]
            if sum(has) > 1:
                raise InvalidArgumentError(
                    f"the unit '{unit}' has parameters of several {self._one}s; give each {self._one} a unit of its own"
                )
            of_chunks[has.index(True) if any(has) else 0][unit] = names
        found = [
            find_units(self.model, own or None, by_calls, known.keys() - tensors.keys())
            for own, tensors in zip(of_chunks, self.parameters, strict=True)
        ]
        for stage in range(self.count):
            used: set[str] = set()  # chunks may have parts of one module
            for group in itertools.chain(*found[stage :: self.count]):
                group.name = name_apart(group.name, used)
        return found

    # ---- what stays ----

    def keep_own(self, stored: Container[str]) -> None:
        """Leaves the model what this stage has of it, under its names, with what passes values on in the place of the rest. Other
        stages' tensors go to the meta device. Where parameters get first values by rules, all stages' modules stay in the model until
        forget_others(), since rules take random numbers one module after another. stored: the names of parameters that do not."""
        unset = {name for name, t in [*self.model.named_parameters(), *self.model.named_buffers()] if t.is_meta and name not in stored}
        kept = {module for number in self.own for name in self.names[number] for module in self.model.get_submodule(name).modules()}
        for number, names in enumerate(self.names):
            for name in names:
                if number in self.own:
                    self._leave_out(number, name)
                else:
                    self._replace(number, name, unset, kept)
        self.parameters = []  # which would keep those of other stages
        if self.tied is not None and self.stage + 1 == self.count:
            self._hooks_of_table = _without_hooks(self.model.get_submodule(self.tied))
            filler = _filler(self.blocks.before[self.tied])
            self.lookups = Table(self.model, self.tied, self.blocks.after, self.lags, self.chunks - 1, filler)
        if self.blocks.of_transformers:
            self.passage.install()

    def _replace(self, number: int, name: str, unset: Container[str], kept: Container[torch.nn.Module]) -> None:
        """Puts what passes values on in the place of another stage's module. unset: the names of what gets first values by rules; kept:
        the modules that this stage has."""
        module = self.model.get_submodule(name)
        holder, _, own = name.rpartition(".")
        fetching = self.lookups if name == self.tied and isinstance(self.lookups, Fetching) else None
        instead = self._gap(name, module) if fetching is None else _Elsewhere(module, fetching.fetch)
        setattr(self.model.get_submodule(holder), own, instead)
        if fetching is not None:
            vars(instead).update(_without_hooks(module))
            self._leave_out(0, name)
        for key, p in module.named_parameters(name):
            if key in unset:
                setattr(p, DRAWN, True)
        if unset:
            instead.add_module("elsewhere", module)
        for each in [m for m in module.modules() if m not in kept]:
            _let_go(each)
            each.register_forward_pre_hook(functools.partial(self._refuse_call, name, number))

    def _leave_out(self, number: int, name: str) -> None:
        """Lets calls of this stage's other chunks pass over what is at a place."""
        if self.chunks == 1:
            return
        holder, _, own = name.rpartition(".")
        module = self.model.get_submodule(name)
        self.passage.leave_out(number // self.count, self.model.get_submodule(holder), own, self._gap(name, module))
        for each in module.modules():
            if next(each.parameters(recurse=False), None) is not None:
                self._hooks.append(each.register_forward_pre_hook(functools.partial(self._refuse_call, name, number)))

    def _refuse_call(self, name: str, number: int, *_: Any) -> None:
        """Comes before a call of what a chunk has. On one rank gradients of both calls would be added in another order."""
        now = self.passage.called
        if number in self.own and now in (None, number // self.count):
            return
        here = f"stage {self.stage}" if now is None else self._name_of(self.own[now])
        raise InvalidArgumentError(
            f"a layer of {here} calls '{name}', which {self._name_of(number)} has; cut the model so that one {self._one} has both "
            "(stages=...), or give the layer what it needs as a value that layers pass on"
        )

    def forget_others(self) -> None:
        """Ends what keep_own() has left of other stages."""
        for module in self.model.modules():
            if isinstance(module, _Elsewhere) and hasattr(module, "elsewhere"):
                del module.elsewhere

    def close(self) -> None:
        """Leaves this stage's modules as they were."""
        self.lookups.close()
        for hook in self._hooks:
            hook.remove()
        vars(self.model.get_submodule(self.tied or "")).update(self._hooks_of_table)

    def _gap(self, name: str, module: torch.nn.Module) -> _Elsewhere:
        """Returns a module that passes values on in this module's place."""
        if name in self.blocks.before:
            return _Elsewhere(module, _filler(self.blocks.before[name]))
        if name in self.blocks.after or not self.blocks.of_transformers:
            return _Elsewhere(module, lambda value: value)
        pass_on, tuples = functools.partial(self.passage.at, self.blocks.names.index(name)), self.blocks.gives_tuples
        return _Elsewhere(module, lambda value: (pass_on(value),) if tuples else pass_on(value))


class Chunk(NamedTuple):
    """The blocks of one of a stage's chunks, and where what it computes comes from and goes."""

    first: int  # block
    end: int
    receives: bool
    sends: bool


class Passage:
    """Passes values into a stage's part of a model, and out of it: a call runs the model's own code with the blocks of one chunk alone."""

    def __init__(self, model: torch.nn.Module, chunks: Sequence[Chunk]) -> None:
        self._run: Callable[..., Any] = type(model).forward
        self._model, self._chunks = model, chunks
        self.called: Optional[int] = None  # the chunk
        self._places: list[tuple[int, torch.nn.Module, str, torch.nn.Module]] = []
        self._value: Any = None

    def leave_out(self, chunk: int, holder: torch.nn.Module, name: str, gap: torch.nn.Module) -> None:
        """Has the gap take a module's place in calls of other chunks than this."""
        self._places.append((chunk, holder, name, gap))

    @contextlib.contextmanager
    def calling(self, chunk: int) -> Iterator[None]:
        """A `with` in which the model is called for a chunk."""
        gaps = [(holder, name, gap, getattr(holder, name)) for of, holder, name, gap in self._places if of != chunk]
        self.called = chunk
        try:
            for holder, name, gap, _ in gaps:
                setattr(holder, name, gap)
            yield
        finally:
            for holder, name, _, module in gaps:
                setattr(holder, name, module)
            self.called = None

    def install(self) -> None:
        """Lets a model of transformers take what a chunk receives, and give what it sends."""
        model, run = self._model, self._run

        def forward(*args: Any, **kwargs: Any) -> Any:
            chunk = self._chunk
            if chunk.receives:
                self._value, *args = args  # type: ignore[assignment]
            output = run(model, *args, **kwargs)
            value, self._value = self._value, None
            return value if chunk.sends else output

        model.forward = forward
        vars(model)["tie_weights"] = lambda *_, **__: None  # what shares a tensor is on one stage, and shares it already

    def at(self, number: int, value: Any) -> Any:
        """Returns the output of a block that is left out: its input, or, of the block before the first one, the received value. Notes the
        output of the last block."""
        chunk = self._chunk
        if chunk.sends and number == chunk.end:
            self._value = value
        return self._value if chunk.receives and number == chunk.first - 1 else value

    @property
    def _chunk(self) -> Chunk:
        return self._chunks[self.called or 0]


class _Elsewhere(torch.nn.Module):
    """Stands for a module that another stage has."""

    def __init__(self, module: torch.nn.Module, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.then = then
        # Attributes of blocks that a model's code reads, such as the kind of attention.
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (str, int, float)) and not k.startswith("_")}
        self.__dict__.update({k: v for k, v in plain.items() if k not in self.__dict__})
        if (weight := dict(module.named_parameters(recurse=False)).get("weight")) is not None:
            self.__dict__["weight"] = torch.empty(0, dtype=weight.dtype, device="meta")  # models of Mamba read the type of their head's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Passes on its first argument, or what `then` makes of it."""
        return self.then(_first(args, kwargs))


def _without_hooks(module: torch.nn.Module) -> dict[str, Any]:
    """Takes a module's forward hooks, which are returned under the names of its attributes."""
    taken = {key: hooks for key, hooks in vars(module).items() if "forward" in key and "hooks" in key}
    vars(module).update({key: type(hooks)() for key, hooks in taken.items()})
    return taken


def _filler(stub: Stub) -> Callable[[Any], Any]:
    def fill(value: torch.Tensor) -> torch.Tensor:
        if not stub.width:
            return value
        shape = value.shape if stub.wider else value.shape[:-1]
        return torch.zeros((), dtype=stub.dtype, device=value.device).expand(*shape, stub.width)

    return fill


def _let_go(module: torch.nn.Module) -> None:
    """Takes a module's tensors."""
    for key, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
        if not p.is_meta:
            setattr(module, key, torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad))
    for key, b in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
        setattr(module, key, torch.empty_like(b, device="meta"))


# ---- a table that embedding and head share: the last stage has it, and looks tokens up for the first one ----


class _Use(torch.autograd.Function):
    """A use of the table, whose gradient goes through a function."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, through: Callable[[torch.Tensor], Optional[torch.Tensor]]) -> torch.Tensor:
        ctx.through = through
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        return ctx.through(gradient), None


class Lookups:
    """The lookups in a shared table, which this stage makes none of. Where it does, a step begins by begin(), and calls the other methods as
    it comes to its micro-batches (items)."""

    are_made = False  # whether this is one of the two stages that have to do with a shared table
    border: Border
    ids: Sequence[torch.Tensor]  # the tokens of each micro-batch
    item = 0  # the micro-batch that is computed
    chunk = 0  # of the stage: that in which they are used
    _of_item: Callable[[int], None]

    def begin(self, border: Border, ids: Sequence[torch.Tensor], of_item: Callable[[int], None]) -> int:
        """Begins a step. Returns the most bytes that it holds beside what its calls take. of_item: comes with the number of a micro-batch
        before gradients of it."""
        self.border, self.ids, self.item, self._of_item = border, ids, 0, of_item
        return 0

    def begin_messages(self) -> None:
        """Begins to pass on what the first micro-batches need."""

    def after_forward(self, item: int) -> None:
        """Comes after the stage's forward pass."""

    def after_backward(self, item: int) -> None:
        """Comes after the stage's backward pass."""

    def end(self) -> None:
        """Ends the step."""

    def drop(self) -> None:
        """Comes instead where the step has failed."""

    def close(self) -> None:
        """Leaves the modules as they were."""


class Table(Lookups):
    """The table, on the last stage, which looks tokens up some micro-batches ahead of the first stage, so that this waits for none.

    In a micro-batch the table's gradient is the head's part, which is there after this stage's backward pass, and the embedding's, which is
    there after the first stage's, and is 0 but for rows of the micro-batch's tokens. One rank adds the two, and then micro-batch to
    micro-batch. Here the head's part waits for the other one, in the rows that the step looks up: so the same numbers are added in the same
    order. With `adds_once` it waits in all rows, and the engine gets one gradient for each micro-batch: the sum of both parts."""

    are_made = True

    def __init__(
        self, model: torch.nn.Module, embedding: str, heads: Sequence[str], lags: Lags, chunk: int, fill: Callable[[Any], Any]
    ) -> None:
        """chunk: with the heads; fill: what the model's own code gets of the embedding on this stage, where no value of it counts."""
        self._module = module = model.get_submodule(embedding)
        self._lags, self.chunk = lags, chunk
        self._changed = [module]  # modules whose forward() is replaced
        self.calls: Callable[..., Any] = lambda run, *args: run(*args)  # on a GPU calls_with(); touches bring the table in
        self.adds_once = False  # where gradients are reproducible, of which a micro-batch has one
        self._in_head: Optional[torch.Tensor] = None  # as heads use it in this micro-batch
        self._look = self._with(module, "weight", lambda p: _Use.apply(p, self._both))
        module.forward = lambda *args, **kwargs: fill(next(iter((*args, *kwargs.values()))))
        for name in heads:
            for head in model.get_submodule(name).modules():
                for key, p in head.named_parameters(recurse=False):
                    if p is module.weight:
                        head.forward = self._with(head, key, self._used_by_head)
                        self._changed.append(head)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The table itself."""
        return self._module.weight  # type: ignore[return-value]

    def close(self) -> None:
        for module in self._changed:
            vars(module).pop("forward", None)

    def _with(self, module: torch.nn.Module, key: str, use: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
        """A module's forward() with a use of the table in the parameter's place."""
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            table: Any = getattr(module, key)
            if not (has_memory(table) and torch.is_grad_enabled() and table.requires_grad):  # without memory a call is estimated
                return run(*args, **kwargs)
            vars(module)[key] = use(table)  # is found before the parameter
            try:
                return run(*args, **kwargs)
            finally:
                del vars(module)[key]

        return forward

    def _used_by_head(self, table: torch.Tensor) -> torch.Tensor:
        if self._in_head is None:
            self._in_head = _Use.apply(table, functools.partial(self._hold_back, self.item))
        return self._in_head

    def _hold_back(self, item: int, gradient: torch.Tensor) -> Optional[torch.Tensor]:
        if self.adds_once:
            self._waiting[item] = gradient
            return None
        self._waiting[item] = gradient.index_select(0, self._rows)
        return gradient.index_fill(0, self._rows, 0)

    def _both(self, gradient: torch.Tensor) -> torch.Tensor:
        """The embedding's part of the micro-batch whose turn it is, with what the head's has kept back."""
        if self._added not in self._waiting:
            return gradient
        of_head = self._waiting.pop(self._added)
        if self.adds_once:
            return of_head + gradient
        return gradient.index_copy(0, self._rows, of_head + gradient.index_select(0, self._rows))

    def begin(self, border: Border, ids: Sequence[torch.Tensor], of_item: Callable[[int], None]) -> int:
        super().begin(border, ids, of_item)
        self._rows = torch.unique(torch.cat([each.reshape(-1) for each in ids]))  # those that the step looks up
        self._waiting: dict[int, torch.Tensor] = {}  # by micro-batch: the head's part of these rows
        self._found: dict[int, torch.Tensor] = {}  # by micro-batch: what was looked up
        self._added = 0  # micro-batches whose embedding's part was added
        table, waiting = self.weight, min(self._lags.behind + 1, len(ids))
        row = table.shape[1] * table.element_size()
        trains = torch.is_grad_enabled() and table.requires_grad
        found = min(self._lags.ahead + waiting, len(ids)) * ids[0].numel()
        rows = table.shape[0] if self.adds_once else len(self._rows)
        return found * row + (waiting * rows * row + table.nbytes if trains else 0)  # and a copy of a gradient

    def begin_messages(self) -> None:
        for item in range(min(self._lags.ahead, len(self.ids))):
            self._send(item)

    def _send(self, item: int) -> None:
        found = self.calls(self._look, self.ids[item])
        self.border.send(item, found)
        if torch.is_grad_enabled():
            self._found[item] = found

    def after_forward(self, item: int) -> None:
        self._in_head = None  # it refers to this object, which would else keep it, and with it the engine
        if item + self._lags.ahead < len(self.ids):
            self._send(item + self._lags.ahead)
        if not torch.is_grad_enabled():
            self.border.end_sent(item)  # it has long been used

    def after_backward(self, item: int) -> None:
        self.border.begin_gradients(item)
        self._add(item - self._lags.behind)

    def _add(self, last: int) -> None:
        """Adds the embedding's parts up to this micro-batch's."""
        while self._added <= last:
            ((gradient,), found) = self.border.gradients(self._added) or [None], self._found.pop(self._added)
            if found.requires_grad:
                self._of_item(self._added)
                found.backward(torch.zeros_like(found) if gradient is None else gradient)
            self._added += 1

    def end(self) -> None:
        if self._found:
            self._add(len(self.ids) - 1)

    def drop(self) -> None:
        self._in_head = None
        self._found.clear()  # as in after_forward()


class Fetching(Lookups):
    """The stand-in for the embedding on the first stage: it fetches the rows that the last stage looks up."""

    are_made = True

    def __init__(self, fill: Callable[[Any], Any]) -> None:
        """fill: what it gives where a call is estimated."""
        self._fill = fill
        self._came: dict[int, dict[int, torch.Tensor]] = {}
        self.item, self.ids = 0, ()

    def begin(self, border: Border, ids: Sequence[torch.Tensor], of_item: Callable[[int], None]) -> int:
        self._came.clear()
        return super().begin(border, ids, of_item)  # a call takes what it fetches

    def begin_messages(self) -> None:
        for item in range(min(2, len(self.ids))):
            self.border.begin_value(item)

    def fetch(self, ids: Any) -> Any:
        """The embedding's output for the tokens of the micro-batch."""
        if not has_memory(ids):
            return self._fill(ids)
        with of_thread.waiting():  # for a GPU
            is_due = len(self.ids) > 0 and self.item not in self._came and torch.equal(ids, self.ids[self.item])
        if not is_due:
            _refuse_embedding(f"is called with other values than the batch's {IDS}, or more than once")
        came = self._came[self.item] = {}
        return self.border.value(self.item, came.__setitem__)

    def after_forward(self, item: int) -> None:
        if item + 2 < len(self.ids):
            self.border.begin_value(item + 2)

    def after_backward(self, item: int) -> None:
        if item not in self._came:
            _refuse_embedding("is not called")
        self.border.send_gradients(item, self._came.pop(item))


def _refuse_embedding(what: str) -> NoReturn:
    raise InvalidArgumentError(
        f"the model's embedding {what}, and its table is on the last stage, whose head shares it; untie the two (tie_word_embeddings=False)"
    )


def _tied_embedding(model: torch.nn.Module, before: Iterable[str], after: Iterable[str]) -> Optional[str]:
    """The embedding among the modules before the blocks whose table a module after them has, too."""
    of_heads = {id(p) for name in after for p in model.get_submodule(name).parameters()}
    for name in before:
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding) and id(module.weight) in of_heads:
            return name
    return None


# ---- what a model consists of ----


def model_of(given: Any) -> torch.nn.Module:
    """The model, of which a list may have the layers."""
    if isinstance(given, (list, tuple)):
        if not given or not all(isinstance(layer, torch.nn.Module) for layer in given):
            raise InvalidArgumentError(f"the layers are {given!r:.80}; a list of torch.nn.Module is needed")
        return torch.nn.Sequential(*given)
    if not isinstance(given, torch.nn.Module):
        raise InvalidArgumentError(
            f"the model is {given!r:.80}; a torch.nn.Sequential, a list of layers or a model of transformers is needed"
        )
    return given


def blocks_of(model: torch.nn.Module) -> Blocks:
    """Finds a model's blocks. Raises InvalidArgumentError where they are not known to follow one another."""
    if isinstance(model, torch.nn.Sequential) and type(model).forward is torch.nn.Sequential.forward:
        return Blocks("", _children(model), {}, [], False)
    if not callable(getattr(model, "get_output_embeddings", None)):
        raise InvalidArgumentError(
            f"{type(model).__name__} is neither a torch.nn.Sequential nor a causal model of transformers, so that it is not known which of "
            "its modules follow one another; give a list of them"
        )
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(_is_in(name, outer) for outer in lists)
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1 and not inside and all(map(has_children, module)):
            lists.append(name)
    if len(lists) != 1:
        raise InvalidArgumentError(
            f"{type(model).__name__} has {len(lists)} lists of blocks{': ' if lists else ''}{', '.join(lists)}, and a pipeline cuts one; "
            "give a list of layers whose calls follow one another"
        )
    return _by_a_call(model, lists[0])


def _by_a_call(model: torch.nn.Module, holder: str) -> Blocks:
    """Finds the modules that are called before and after the blocks, by a call without values, in which each block returns its input. A
    model that takes the first element of a block's result, where that is a tensor, calls the next block with less."""
    names = [f"{holder}.{name}" for name in _children(model.get_submodule(holder))]
    besides = _besides(model, names)
    tuples = False
    try:
        before, after, calls = _called(model, holder, besides, False)
    except _TakesFirst:
        tuples = True
        before, after, calls = _called(model, holder, besides, True)
    again = before.keys() & set(after)
    if again or calls != len(names):
        what = f"makes {calls} calls of its {len(names)} blocks"
        what = f"calls '{next(iter(again))}' before and after its blocks" if again else what
        raise InvalidArgumentError(
            f"{type(model).__name__} {what}, which cannot be cut; give a list of layers whose calls follow one another"
        )
    return Blocks(holder, names, before, list(dict.fromkeys(after)), True, tuples)


class _TakesFirst(Exception):
    """A model takes the first element of what a block returns."""


def _called(model: torch.nn.Module, holder: str, besides: Sequence[str], tuples: bool) -> tuple[dict[str, Stub], list[str], int]:
    """The modules that are called before the blocks, those after them, and how often blocks are called."""
    before: dict[str, Stub] = {}
    after: list[str] = []
    shapes: list[tuple[int, ...]] = []

    def block(value: Any) -> Any:
        shapes.append(tuple(value.shape))
        if shapes[-1] != shapes[0] and not tuples:
            raise _TakesFirst
        return (value,) if tuples else value

    def other(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if shapes:
                after.append(name)
            else:
                before[name] = _stub_of(model, name, _first(args, kwargs), output)

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(other(name), with_kwargs=True) for name in besides]
    places = model.get_submodule(holder)
    blocks = {name: places.get_submodule(name) for name in _children(places)}
    values = Values(FakeTensorMode(allow_non_fake_inputs=True))
    place = next((p.device for p in model.parameters() if not p.is_meta), CPU)
    try:
        for name, module in blocks.items():
            setattr(places, name, _Elsewhere(module, block))
        with torch.random.fork_rng([]), faked(model, values, False), values.fake, values, torch.no_grad():
            model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=place), use_cache=False)
    except (InvalidArgumentError, _TakesFirst):
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{type(model).__name__} cannot be called with input_ids alone, by which its parts are found "
            f"({type(error).__name__}: {error}); give a list of layers whose calls follow one another"
        ) from error
    finally:
        for name, module in blocks.items():
            setattr(places, name, module)
        for hook in hooks:
            hook.remove()
    return before, after, len(shapes)


def _besides(model: torch.nn.Module, blocks: Sequence[str]) -> list[str]:
    """The outermost modules with parameters of their own besides the blocks."""
    found: list[str] = []
    for name, module in model.named_modules():
        own = next((own for own, _ in module.named_parameters(recurse=False)), None)
        if own is None or any(_is_in(name, outer) for outer in [*blocks, *found]):
            continue
        if _is_in(blocks[0], name):
            raise InvalidArgumentError(
                f"'{name}.{own}' is a parameter beside the blocks, and not of a module that is called before or after them, so that it is "
                "not known which stage needs it; move it into a module"
            )
        found.append(name)
    return found


def _stub_of(model: torch.nn.Module, name: str, given: Any, output: Any) -> Stub:
    if isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
        if (given.shape, given.dtype) == (output.shape, output.dtype):
            return Stub()
        for wider, shape in ((True, given.shape), (False, given.shape[:-1])):
            if shape == output.shape[:-1]:
                return Stub(output.shape[-1], output.dtype, wider)
    raise InvalidArgumentError(
        f"'{name}' of {type(model).__name__} comes before the blocks, and it is not known what later stages need of it; give a list of "
        "layers whose calls follow one another"
    )


def _children(module: torch.nn.Module) -> list[str]:
    """The names of a module's children, of which one that is there twice counts twice."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".") or not outer


def _tensors(model: torch.nn.Module, names: Sequence[str]) -> dict[int, tuple[str, torch.Tensor]]:
    """Parameters and buffers of these modules, by their ids, with their names."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name in names:
        module = model.get_submodule(name)
        for own, t in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
            found.setdefault(id(t), (f"{name}.{own}", t))
    return found


def _elements(model: torch.nn.Module, names: Sequence[str]) -> float:
    return float(sum(t.numel() for _, t in _tensors(model, names).values() if isinstance(t, torch.nn.Parameter)))
