"""Backward passes in two halves have the gradients of PyTorch's own, and leave those of weights for the second one."""

import copy

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built
from torch import nn
from transformers.pytorch_utils import Conv1D

import sluice
from sluice.torch._estimate import estimate_call
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


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 8), Conv1D(8, 8)

    def forward(self, x):
        h = self.wide(input=x)
        h += x
        return torch.relu_(self.narrow(h)) + x


def scaled():
    """Layers of which one has a forward() of its own."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers[0].forward = lambda x: 0.1 * nn.functional.linear(x, layers[0].weight, layers[0].bias)
    return layers


CASES = {  # the model, and the parameters whose gradients come in the second half
    "of two and three dimensions": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5)), ["0.weight", "0.bias", "3.weight", "3.bias"]),
    "used twice": (Twice, ["first.weight", "first.bias", "again.weight", "last.weight", "last.bias"]),
    "shared": (Shared, []), "written in place": (InPlace, ["wide.weight", "wide.bias", "narrow.weight", "narrow.bias"]),
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
    with torch.autocast("cpu", enabled=autocast, cache_enabled=False), halves.calling():  # as in a wrapped model
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


def test_layers_that_are_called_otherwise_leave_nothing():
    torch.manual_seed(2)
    model, x = scaled(), torch.randn(6, 8, requires_grad=True)
    halves = Halves(model)
    with halves.calling():
        output = model(x)
    with halves.leaving() as left:
        output.sum().backward()
    assert model[0] not in left.calls and model[0].weight.grad is not None and model[1] in left.calls


class TwiceOnInputs(nn.Module):
    """Calls a layer on its own input, which needs no gradient, before or after another call of it."""

    def __init__(self, is_first):
        super().__init__()
        self.other, self.own, self.is_first = nn.Linear(8, 8), nn.Linear(8, 8), is_first

    def forward(self, x):
        if self.is_first:
            return self.own(torch.tanh(self.own(x)))
        return self.own(torch.tanh(self.other(x))) + self.own(x)


def test_all_calls_of_a_layer_in_a_step_are_alike():
    torch.manual_seed(3)
    whole = TwiceOnInputs(is_first=True)
    model, x = copy.deepcopy(whole), torch.randn(6, 8)
    halves = Halves(model)
    for may_leave in (False, True):  # and in another step the layer is called on other inputs
        halves.begin_step()
        with halves.calling():
            expected, output = whole(x.requires_grad_(may_leave)), model(x)
            with torch.no_grad():
                model(x)
        expected.square().sum().backward()
        with halves.leaving() as left:
            output.square().sum().backward()
        assert (model.own in left.calls) == may_leave
        left.finish()
        assert all(g is None or torch.equal(g, gradients(whole)[n]) for n, g in gradients(model).items())


def test_calls_of_a_layer_that_cannot_be_alike_are_refused():
    model = TwiceOnInputs(is_first=False)
    with Halves(model).calling(), pytest.raises(sluice.StateError, match="'own' is called several times in a step.*or pipeline=\"1f1b\""):
        model(torch.randn(6, 8))


def test_layers_of_compiled_modules_leave_nothing():
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager"), nn.Linear(8, 8))
    model[2].compile(backend="eager")
    halves = Halves(model)
    with halves.calling():
        output = model(torch.randn(4, 8, requires_grad=True))
    with halves.leaving() as left:
        output.sum().backward()
    assert list(left.calls) == [model[0]] and all((p.grad is None) == name.startswith("0.") for name, p in model.named_parameters())


def test_a_gradient_within_a_call_says_what_to_do():
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8, requires_grad=True)
    with Halves(model).calling(), pytest.raises(sluice.StateError, match="give pipeline=\"1f1b\""):
        torch.autograd.grad(model(x).sum(), x)


def test_the_second_half_is_in_an_estimate():
    model, x = nn.Sequential(nn.Linear(16, 1 << 16)), torch.randn(1, 16, requires_grad=True)
    halves = Halves(model)
    with halves.calling(), halves.leaving() as left:
        found = estimate_call(model, model, (x,), {}, True, left=left)
    assert found.peak >= 4 * 16 << 16


def test_gradients_of_several_passes_are_added_in_their_order():
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, parts = copy.deepcopy(whole), [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    halves, waiting = Halves(model), []
    for x in parts:
        whole(x).square().sum().backward()
        with halves.calling():
            output = model(x)
        with halves.leaving() as left:
            output.square().sum().backward()
        waiting.append(left)
    for left in waiting:
        left.finish()
    assert all(torch.equal(g, gradients(whole)[n]) for n, g in gradients(model).items())


def test_a_layer_whose_input_has_no_gradient_leaves_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    halves = Halves(model)
    with halves.calling():
        output = model(torch.randn(4, 8))
    with halves.leaving() as left:
        output.sum().backward()
    assert list(left.calls) == [model[1]] and model[0].weight.grad is not None
