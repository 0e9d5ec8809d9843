"""torch.compile of models that are wrapped on a GPU. The reference is the same model, wrapped on the CPU, where nothing is compiled;
nothing may differ by a bit."""

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of
from support.graphs import Counted
from support.wrapped_models import same, units_of_modules, wrap

import sluice.torch

STEPS = 2


class CompilesInside(Layers):
    """A model that compiles a function of its own, which uses a parameter of the model's own."""

    def __init__(self, backend=None):
        super().__init__()
        self.end = self.scaled if backend is None else torch.compile(self.scaled, backend=backend)

    def scaled(self, x):
        return torch.nn.functional.gelu(x * self.scale) + 1

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.end(x))


def trained(model, before=None, after=None, autocast=False, note=lambda: None, **options):
    """The losses and parameters of a run. before, after: compile the model before and after it is wrapped; after may return what to
    call. note: comes after each step."""
    torch._dynamo.reset()
    if before is not None:
        before(model)
    model, optimizer = wrap(model, "memory", sluice.SGD(lr=1e-2), **({"units": units_of_modules(model), "held_units": 3} | options))
    called = after(model) if after is not None else None
    seen = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model if called is None else called, step)
        loss.backward()
        seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        note()
    sluice.torch.close(model)
    return seen + [p.detach().clone() for p in model.parameters()]


def seeded(make, *given):
    torch.manual_seed(5)
    return make(*given)


def check(make, counted, autocast=False, **how):
    """Checks the bits, and that all graphs are made in the first step."""
    expected = trained(seeded(make), autocast=autocast)
    made = []
    with fake_gpu.shared():
        model = seeded(make, counted) if make is CompilesInside else seeded(make)
        assert same(trained(model, autocast=autocast, note=lambda: made.append(counted.graphs), **(GPU | how)), expected)
        del model
    assert made[0] == made[-1] > 0


def test_functions_that_a_model_compiles():
    check(CompilesInside, Counted(), autocast=True)


def test_blocks_that_were_compiled_before():
    counted = Counted()

    def compile_blocks(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=counted)

    check(Layers, counted, autocast=True, before=compile_blocks)


def compile_in_place(model, backend):
    model.compile(backend=backend)


@pytest.mark.parametrize("when, how", [
    ("after", lambda model, backend: torch.compile(model, backend=backend)), ("before", compile_in_place),
])  # fmt: skip
def test_whole_models(when, how):
    counted = Counted()
    check(Layers, counted, **{when: lambda model: how(model, counted)})
