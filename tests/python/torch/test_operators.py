"""Operators with bodies (torch.cond, scan, and others) use parameters of wrapped models, also such that no module's
call brings in. Outside of graphs PyTorch compiles each of them by itself, and what its body uses becomes its operands."""

import pytest
import torch
from support import fake_gpu
from support.wrapped_models import same, units_of_modules, wrap
from torch import nn
from torch._higher_order_ops.scan import scan

import sluice.torch

WIDTH = 8


class Around(nn.Module):
    """Modules around an operator, and parameters for its body: one of its own, and of modules that nobody calls."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        return self.last(self.operate(self.first(x)))

    def linear(self, layer, x):
        return nn.functional.linear(x, layer.weight, layer.bias)


class Cond(Around):
    def operate(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.linear(self.one, x) * self.scale, lambda x: self.linear(self.other, x), (x,))


class Scan(Around):
    def operate(self, x):
        return scan(lambda carried, row: (self.linear(self.one, carried) + row, carried * self.scale), x[0], x)[1]


def found(make, place, steps=2, **options):
    """The losses and gradients of steps, and the graphs that PyTorch made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, noted = make(), []
    if place is not None:
        model, _ = wrap(model, place, sluice.SGD(lr=1e-2), **({"units": units_of_modules(model), "held_units": 4} | options))
    for step in range(steps):
        loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        noted.append(loss.detach())
        for p in model.parameters():
            noted.append(torch.zeros(()) if p.grad is None else p.grad * 1)
            p.grad = None
    if place is not None:
        sluice.torch.close(model)
    return noted


@fake_gpu.cpu_alone("they use parameters of modules that they do not call")
@pytest.mark.parametrize("make", [Cond, Scan])
def test_they_have_the_bits_of_plain_pytorch(make):
    expected = found(make, None)
    assert same(found(make, "disk"), expected)


class Calls(Around):
    def operate(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x) * self.scale, (x,))


def test_their_bodies_may_call_modules_in_blocks_that_are_compiled_before():
    def make():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.compile(Calls(), backend="aot_eager"), nn.Linear(WIDTH, WIDTH))

    expected = found(make, None)
    assert same(found(make, "disk", held_units=5), expected)


def test_elsewhere_bodies_that_call_modules_are_refused():
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError, match="come and go.*compile its blocks"):
        found(Calls, "memory")


@fake_gpu.cpu_alone("nothing is estimated there, since the plan is made once")
def test_their_calls_need_a_reserve_that_is_stated():
    with pytest.raises(sluice.InvalidArgumentError, match=r"cannot be estimated.*begin with wrap\(reserve="):
        found(Cond, "memory", reserve=None)
