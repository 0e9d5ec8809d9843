"""Backward passes in two halves have the gradients of PyTorch's own, and leave those of weights for the second one."""

import copy

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built
from torch import nn
from transformers.pytorch_utils import Conv1D

from sluice.torch._split_backward import Halves


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), Conv1D(3, 8)

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.again(torch.tanh(self.first(x))))))


class Shared(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self[2].weight = self[0].weight


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


CASES = {  # the model, and the parameters whose gradients come in the second half
    "of two and three dimensions": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5)), ["0.weight", "0.bias", "3.weight", "3.bias"]),
    "used twice": (Twice, ["first.weight", "first.bias", "again.weight", "last.weight", "last.bias"]),
    "shared": (Shared, []),
    "with a frozen weight": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)).requires_grad_(False).append(nn.Linear(5, 5)), ["2.weight", "2.bias"]),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
@pytest.mark.parametrize("case", CASES)
def test_halves_have_the_gradients_of_a_whole_pass(case, rows, autocast):
    torch.manual_seed(0)
    made, apart = CASES[case]
    whole = made()
    model, x = copy.deepcopy(whole), torch.randn(*rows, 8, requires_grad=True)
    halves = Halves(model)
    with torch.autocast("cpu", enabled=autocast, cache_enabled=False):  # as in a wrapped model
        expected, output = whole(x), model(x)
    assert torch.equal(expected, output)
    (of_input,) = torch.autograd.grad(expected.float().square().sum(), [x], retain_graph=True)
    expected.float().square().sum().backward()
    x.grad = None
    with halves.leaving() as left:
        output.float().square().sum().backward()
    assert torch.equal(x.grad, of_input)
    assert [name for name, g in gradients(model).items() if g is None] == [n for n, p in model.named_parameters() if not p.requires_grad or n in apart]
    left.finish()
    assert {n: g is None or torch.equal(g, gradients(whole)[n]) for n, g in gradients(model).items()} == dict.fromkeys(gradients(whole), True)
    assert all((g is None) == (gradients(whole)[n] is None) for n, g in gradients(model).items())


def test_gradients_of_several_passes_are_added_in_their_order():
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, parts = copy.deepcopy(whole), [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    halves, waiting = Halves(model), []
    for x in parts:
        whole(x).square().sum().backward()
        with halves.leaving() as left:
            model(x).square().sum().backward()
        waiting.append(left)
    for left in waiting:
        left.finish()
    assert all(torch.equal(g, gradients(whole)[n]) for n, g in gradients(model).items())


def test_a_layer_whose_input_has_no_gradient_leaves_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    halves = Halves(model)
    with halves.leaving() as left:
        model(torch.randn(4, 8)).sum().backward()
    assert list(left.calls) == [model[1]] and model[0].weight.grad is not None
