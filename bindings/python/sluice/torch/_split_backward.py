"""Backward passes in two halves (ZB-H1, Qi et al. 2023): first the gradients of inputs, for which another stage of a pipeline waits, later
those that linear layers have of their weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._guards import override
from ._modes import outside_of_graphs


class _Weights(NamedTuple):
    """The weights of a linear layer, as a call of it uses them, and where their gradients go."""

    weight: torch.Tensor  # of (outputs, inputs), or (inputs, outputs) where it is transposed
    bias: Optional[torch.Tensor]
    is_transposed: bool  # as transformers' Conv1D has it
    edges: list[GradientEdge]


class _Call(NamedTuple):
    """A call of a linear layer whose weights have no gradients of it yet."""

    edges: list[GradientEdge]
    is_transposed: bool
    inputs: torch.Tensor  # a row for each row of gradients
    gradients: torch.Tensor  # of the outputs

    def give(self) -> list[torch.Tensor]:
        """The gradients, by the products of PyTorch's own backward pass."""
        rows, outputs = self.inputs, self.gradients
        found = [rows.t() @ outputs if self.is_transposed else outputs.t() @ rows]
        return found if len(self.edges) == 1 else [*found, outputs.sum(0)]


class Left:
    """What the first half of a backward pass has left for the second one, by layer."""

    def __init__(self) -> None:
        self.calls: dict[torch.nn.Module, list[_Call]] = {}

    def finish(self) -> None:
        """Runs the second half, one layer after another."""
        while self.calls:
            calls = self.calls.pop(next(iter(self.calls)))
            edges = [edge for call in calls for edge in call.edges]
            with torch.no_grad():
                gradients = [gradient for call in calls for gradient in call.give()]
            del calls
            torch.autograd.backward(edges, gradients)  # which adds up those of several calls in their order


class Halves:
    """Lets the linear layers of a model leave the gradients of their weights for later. Layers that share a weight, or whose inputs have no
    gradients, leave none. Thread rule: one thread at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._left: Optional[Left] = None
        users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        for module in model.modules():
            if _is_linear(module) and all(users[id(p)] == 1 for p in module.parameters(recurse=False)):
                override(module, "forward", outside_of_graphs(_forward_of(self, module)))

    @contextlib.contextmanager
    def leaving(self) -> Iterator[Left]:
        """A `with` for a first half."""
        before, self._left = self._left, Left()
        try:
            yield self._left
        finally:
            self._left = before

    def leave(self, layer: torch.nn.Module, call: _Call) -> None:
        assert self._left is not None, "a pipeline's backward passes leave them"
        self._left.calls.setdefault(layer, []).append(call)


class _Linear(torch.autograd.Function):
    """A linear layer's call, whose backward pass computes the gradient of its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: _Weights, leave: Callable[[_Call], None]) -> torch.Tensor:
        weight, bias, ctx.is_transposed, ctx.edges = weights
        ctx.leave = leave
        ctx.save_for_backward(x, weight)
        if not ctx.is_transposed:
            return torch.nn.functional.linear(x, weight, bias)
        assert bias is not None, "Conv1D has one"
        return torch.addmm(bias, _rows(x), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = _rows(gradients[0])
        ctx.leave(_Call(ctx.edges, ctx.is_transposed, _rows(x), rows))
        return (rows @ (weight.t() if ctx.is_transposed else weight)).view(x.shape), None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward_of(halves: Halves, layer: Any) -> Callable[[torch.Tensor], Any]:
    """What is called in place of the layer's own forward()."""

    def forward(x: torch.Tensor) -> Any:
        weight, bias, run = layer.weight, layer.bias, type(layer).forward
        trained = [p for p in (weight, bias) if p is not None]
        if not (torch.is_grad_enabled() and x.requires_grad and x.dim() > 1 and all(p.requires_grad for p in trained)):
            return run(layer, x)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, *trained = (t.to(dtype) for t in (x, *trained))
        if any(p.dtype != x.dtype for p in trained):
            return run(layer, x)  # which raises what PyTorch raises
        values = [p.detach() for p in trained]
        weights = _Weights(values[0], None if bias is None else values[1], type(layer) is not torch.nn.Linear, [*map(get_gradient_edge, trained)])
        with torch.autocast(x.device.type, enabled=False):
            return _Linear.apply(x, weights, functools.partial(halves.leave, layer))

    return forward


def _is_linear(module: torch.nn.Module) -> bool:
    of_transformers = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return type(module) in (torch.nn.Linear, of_transformers)
