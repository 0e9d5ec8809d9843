"""A table that a model's embedding and its head share, in a pipeline: the last stage has it, and looks tokens up for the first one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Optional

import torch

from ..errors import InvalidArgumentError
from ._borders import Border
from ._homes import has_memory

IDS = "input_ids"  # by which models of transformers know their tokens


def tied_embedding(model: torch.nn.Module, before: Iterable[str], after: Iterable[str]) -> Optional[str]:
    """The embedding among the modules before the blocks whose table a module after them has, too."""
    of_heads = {id(p) for name in after for p in model.get_submodule(name).parameters()}
    for name in before:
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding) and id(module.weight) in of_heads:
            return name
    return None


class _Use(torch.autograd.Function):
    """A use of the table, whose gradient goes through a function."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, through: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.through = through
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        return ctx.through(gradient), None


class Table:
    """The table on the last stage. In a micro-batch its gradient is the head's part, which is there after this stage's backward pass, and
    the embedding's, which is there after the first stage's, and is 0 but for rows of the micro-batch's tokens. One rank adds the two,
    and then micro-batch to micro-batch. Here the head's part waits for the other one, in the rows that the step looks up: so the same
    numbers are added in the same order."""

    def __init__(self, model: torch.nn.Module, embedding: str, heads: Sequence[str], fill: Callable[[Any], Any]) -> None:
        """fill: what the model's own code gets of the embedding on this stage, where no value of it counts."""
        self._module = module = model.get_submodule(embedding)
        self._changed = [module]  # modules whose forward() is replaced
        self.calls: Callable[..., Any] = lambda run, *args: run(*args)  # on a GPU calls_with(); touches bring the table in
        self._in_head: Optional[torch.Tensor] = None  # as heads use it in this micro-batch
        self._item, self._rows = 0, torch.empty(0, dtype=torch.int64)  # the micro-batch, and the rows of it that wait
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by micro-batch: rows, and the head's part of them
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
        """Leaves the modules as they were."""
        for module in self._changed:
            vars(module).pop("forward", None)

    def bytes_held(self, waiting: int, ahead: int) -> int:
        """The bytes of so many rows that wait, and of so many tokens that are looked up ahead."""
        table = self.weight
        row = table.shape[1] * table.element_size()
        trains = torch.is_grad_enabled() and table.requires_grad
        return ahead * row + (waiting * row + table.nbytes if trains else 0)  # and a copy of a gradient

    def _with(self, module: torch.nn.Module, key: str, use: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
        """A module's forward() with a use of the table in the parameter's place."""
        run, places = module.forward, module._parameters

        def forward(*args: Any, **kwargs: Any) -> Any:
            table: Any = places[key]
            if not (has_memory(table) and torch.is_grad_enabled() and table.requires_grad):  # without memory a call is estimated
                return run(*args, **kwargs)
            places[key] = use(table)
            try:
                return run(*args, **kwargs)
            finally:
                places[key] = table

        return forward

    def _used_by_head(self, table: torch.Tensor) -> torch.Tensor:
        if self._in_head is None:
            self._in_head = _Use.apply(table, functools.partial(self._hold_back, self._item, self._rows))
        return self._in_head

    def _hold_back(self, item: int, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._waiting[item] = rows, gradient.index_select(0, rows)
        return gradient.index_fill(0, rows, 0)

    def _both(self, gradient: torch.Tensor) -> torch.Tensor:
        """The embedding's part, with what the head's has kept back."""
        if self._item not in self._waiting:
            return gradient
        rows, of_head = self._waiting.pop(self._item)
        return gradient.index_copy(0, rows, of_head + gradient.index_select(0, rows))

    def begin(self, item: int, rows: torch.Tensor) -> None:
        """Comes before this stage's forward pass. rows: those in which the head's part waits."""
        self._in_head, self._item, self._rows = None, item, rows

    def end(self) -> None:
        """Comes after it. What was used refers to this object, which would else keep it, and with it the engine."""
        self._in_head = None

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """What the embedding gives for these tokens."""
        found: torch.Tensor = self.calls(self._look, ids)
        return found

    def add(self, item: int, found: torch.Tensor, gradient: Optional[torch.Tensor]) -> None:
        """Adds the embedding's part. found: what it gave; gradient: of that, None where nothing used it."""
        if found.requires_grad:
            self._item = item
            found.backward(torch.zeros_like(found) if gradient is None else gradient)


class LookedUp:
    """The lookups of a step, on the last stage: some micro-batches ahead of the first stage, which waits for none."""

    def __init__(self, table: Table, border: Border, ids: Sequence[torch.Tensor], stages: int) -> None:
        """ids: the tokens of each micro-batch."""
        self.border, self._table, self._ids, self._stages = border, table, ids, stages
        self._found: dict[int, torch.Tensor] = {}
        self._rows = torch.unique(torch.cat([each.reshape(-1) for each in ids]))  # those that the step looks up
        self._added = 0  # micro-batches whose embedding's part was added

    def bytes_held(self) -> int:
        """The most bytes that the step holds beside what its calls take."""
        under_way = min(self._stages, len(self._ids))
        return self._table.bytes_held(under_way * len(self._rows), (under_way + 2) * self._ids[0].numel())

    def begin(self) -> None:
        for item in range(min(self._stages + 1, len(self._ids))):
            self._send(item)

    def _send(self, item: int) -> None:
        found = self._table.look_up(self._ids[item])
        self.border.send(item, found)
        if torch.is_grad_enabled():
            self._found[item] = found

    def before_forward(self, item: int) -> None:
        self._table.begin(item, self._rows)

    def after_forward(self, item: int) -> None:
        self._table.end()
        if item + self._stages + 1 < len(self._ids):
            self._send(item + self._stages + 1)
        if not torch.is_grad_enabled():
            self.border.end_sent(item)  # it has long been used

    def after_backward(self, item: int) -> None:
        self.border.begin_gradients(item)
        self._add(item - self._stages + 1)

    def _add(self, last: int) -> None:
        """Adds the embedding's parts up to this micro-batch's."""
        while self._added <= last:
            ((gradient,), found) = self.border.gradients(self._added) or [None], self._found.pop(self._added)
            self._table.add(self._added, found, gradient)
            self._added += 1

    def end(self) -> None:
        if self._found:
            self._add(len(self._ids) - 1)


class Fetching:
    """What the module in the embedding's place gives on the first stage."""

    def __init__(self, fill: Callable[[Any], Any]) -> None:
        """fill: what it gives where a call is estimated."""
        self._fill = fill
        self.fetch: Callable[[torch.Tensor], torch.Tensor] = fill  # in a step

    def __call__(self, ids: Any) -> Any:
        return self.fetch(ids) if has_memory(ids) else self._fill(ids)


class Fetched:
    """The lookups of a step, on the first stage."""

    def __init__(self, embedding: Fetching, border: Border, ids: Sequence[torch.Tensor]) -> None:
        self.border, self._ids, self._item = border, ids, 0
        self._came: dict[int, dict[int, torch.Tensor]] = {}
        embedding.fetch = self._fetch

    def bytes_held(self) -> int:
        return 0  # a call takes what it fetches

    def begin(self) -> None:
        for item in range(min(2, len(self._ids))):
            self.border.begin_value(item)

    def _fetch(self, ids: torch.Tensor) -> torch.Tensor:
        if self._item in self._came or not torch.equal(ids, self._ids[self._item]):
            _refuse(f"is called with other values than the batch's {IDS}, or more than once")
        came = self._came[self._item] = {}
        found: torch.Tensor = self.border.value(self._item, came.__setitem__)
        return found

    def before_forward(self, item: int) -> None:
        self._item = item

    def after_forward(self, item: int) -> None:
        if item + 2 < len(self._ids):
            self.border.begin_value(item + 2)

    def after_backward(self, item: int) -> None:
        if item not in self._came:
            _refuse("is not called")
        self.border.send_gradients(item, self._came.pop(item))

    def end(self) -> None:
        """Nothing is left."""


def _refuse(what: str) -> NoReturn:
    raise InvalidArgumentError(
        f"the model's embedding {what}, and its table is on the last stage, whose head shares it; untie the two (tie_word_embeddings=False)"
    )
