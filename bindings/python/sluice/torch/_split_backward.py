"""Backward passes in two halves (ZB-H1, Qi et al. 2023): first the gradients of inputs, for which another stage of a pipeline waits, later
those that linear layers have of their weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ..errors import StateError
from ._guards import override
from ._modes import is_compiled, outside_of_graphs


class _Call(NamedTuple):
    """A call of a linear layer whose weights have no gradients of it yet."""

    is_transposed: bool
    inputs: torch.Tensor  # a row for each row of gradients
    gradients: torch.Tensor  # of the outputs

    def give(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the weight, and of the bias if there is one, by the products of PyTorch's own backward pass."""
        rows, outputs = self.inputs, self.gradients
        found = rows.t() @ outputs if self.is_transposed else outputs.t() @ rows
        return [found.to(parameters[0].dtype), *(outputs.sum(0).to(p.dtype) for p in parameters[1:])]


class Left:
    """What the first half of a backward pass has left for the second one, by layer."""

    def __init__(self) -> None:
        self.calls: dict[torch.nn.Module, list[_Call]] = {}

    def finish(self) -> None:
        """Runs the second half, one layer after another."""
        while self.calls:
            layer = next(iter(self.calls))
            with torch.enable_grad():
                _Weights.apply(self.calls.pop(layer), *_parameters(layer)).backward()


class _Weights(torch.autograd.Function):
    """A layer's second half. Its gradients have no other owner than autograd, which would copy them otherwise."""

    @staticmethod
    def forward(ctx: Any, calls: list[_Call], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.calls, ctx.parameters = calls, parameters
        return calls[0].inputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        calls: list[_Call] = ctx.calls
        found = calls.pop(0).give(ctx.parameters)
        while calls:  # autograd adds the gradients of several calls in this order
            for gradient, more in zip(found, calls.pop(0).give(ctx.parameters), strict=True):
                gradient += more
        return None, *found


class Halves:
    """Lets the linear layers of a model leave the gradients of their weights for later. Layers that share a weight, that have a forward() of
    their own, or whose inputs have no gradients, leave none. Nor do those of compiled modules, which are whole graphs. What a layer does in
    its first call of a step it does in all of them: autograd adds the gradients of several calls in a micro-batch, so that they must come
    together. Thread rule: one thread at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._left: Optional[Left] = None
        self._calls = False
        self._leave: dict[torch.nn.Module, bool] = {}  # whether the calls of this step do, by layer
        users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        in_graphs = {inner for outer in model.modules() if is_compiled(outer) for inner in outer.modules()}
        for name, module in model.named_modules():
            if module not in in_graphs and _is_linear(module) and all(users[id(p)] == 1 for p in module.parameters(recurse=False)):
                override(module, "forward", outside_of_graphs(_forward_of(self, module, name)))

    def begin_step(self) -> None:
        """Comes before the calls of a step."""
        self._leave.clear()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """A `with` for a call whose backward pass is in halves."""
        self._calls = True
        try:
            yield
        finally:
            self._calls = False

    @contextlib.contextmanager
    def leaving(self) -> Iterator[Left]:
        """A `with` for a first half."""
        before, self._left = self._left, Left()
        try:
            yield self._left
        finally:
            self._left = before

    @property
    def are_used(self) -> bool:
        """Whether this is in such a call, or in a first half, where checkpoints call layers again."""
        return self._calls or self._left is not None

    def leaves(self, layer: torch.nn.Module, name: str, can: bool) -> bool:
        """Whether a call of a layer leaves gradients. can: whether it could, were it the only one."""
        does = self._leave.setdefault(layer, can)
        if does and not can:
            raise StateError(
                f"'{name}' is called several times in a step: on an input that needs a gradient, and then on one that needs none, is not "
                'contiguous, or is of another type or number of dimensions. Gradients of its weight would come at different times with '
                'pipeline="zb-h1"; give it inputs that are alike, or pipeline="1f1b"'
            )
        return does

    def leave(self, layer: torch.nn.Module, call: _Call) -> None:
        if self._left is None:
            raise StateError(
                "gradients are computed within a call of the model (torch.autograd.grad(), backward()), and those of weights are to come later "
                'with pipeline="zb-h1"; give pipeline="1f1b"'
            )
        self._left.calls.setdefault(layer, []).append(call)


class _Linear(torch.autograd.Function):
    """A linear layer's call for rows, whose backward pass computes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, is_transposed: bool, leave: Callable[[_Call], None], weight: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        ctx.is_transposed, ctx.leave = is_transposed, leave
        ctx.save_for_backward(x, weight)
        if not is_transposed:
            return torch.nn.functional.linear(x, weight, bias)
        assert bias is not None, "Conv1D has one"
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.leave(_Call(ctx.is_transposed, x, gradients[0]))
        return gradients[0] @ (weight.t() if ctx.is_transposed else weight), None, None, None, None


def _parameters(layer: Any) -> list[torch.nn.Parameter]:
    return [p for p in (layer.weight, layer.bias) if p is not None]


def _forward_of(halves: Halves, layer: Any, name: str) -> Callable[..., Any]:
    """What is called in place of the layer's own forward()."""
    is_transposed = type(layer) is not torch.nn.Linear

    def forward(*args: Any, **kwargs: Any) -> Any:
        given, trained = [*args, *kwargs.values()], _parameters(layer)
        x, dtypes = given[0] if given else None, {p.dtype for p in trained}
        if not isinstance(x, torch.Tensor) or not (halves.are_used and torch.is_grad_enabled() and any(p.requires_grad for p in trained)):
            return type(layer).forward(layer, *args, **kwargs)
        casts = torch.is_autocast_enabled(x.device.type)
        # Of other shapes PyTorch adds the bias in another way.
        is_by_rows = x.dim() == 2 or (x.dim() > 2 and (is_transposed or layer.bias is None or (x.dim() == 3 and x.is_contiguous())))
        has_gradients = x.requires_grad and all(p.requires_grad for p in trained)
        if not halves.leaves(layer, name, has_gradients and is_by_rows and (casts or dtypes == {x.dtype})):
            return type(layer).forward(layer, *args, **kwargs)
        dtype = torch.get_autocast_dtype(x.device.type) if casts else x.dtype
        rows, *values = (t.to(dtype) for t in (x.reshape(-1, x.shape[-1]), *(p.detach() for p in trained)))
        with torch.autocast(x.device.type, enabled=False):
            output = _Linear.apply(rows, is_transposed, functools.partial(halves.leave, layer), *values)
        return output.view(*x.shape[:-1], output.shape[-1])

    return forward


def _is_linear(module: torch.nn.Module) -> bool:
    of_transformers = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return type(module) in (torch.nn.Linear, of_transformers) and "forward" not in vars(module)
