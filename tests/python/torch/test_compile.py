"""torch.compile of wrapped models and their blocks gives the same numbers, with graphs that break where parameters come
and go; one graph of a whole model is refused, with what to do instead."""

import functools
import gc

import pytest
import torch
from support import rounding
from support.gpu_models import Block
from support.graphs import Counted
from support.wrapped_models import same, values_of, wrap
from torch import nn

import sluice.torch

BLOCKS = 2
MANY = 12  # more blocks than torch.compile() makes graphs of one function (torch._dynamo.config.recompile_limit)


class Model(nn.Module):
    def __init__(self, blocks=BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(24) for _ in range(blocks))
        self.head = nn.Linear(24, 24)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, step):
    return model(torch.randn(5, 24, generator=torch.Generator().manual_seed(step))).square().mean()


def blocks_into(model, backend, **options):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend, **options)


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


def compile_in_place(model, backend):
    model.compile(backend=backend)


def trained(place, before=None, after=None, backend="aot_eager", blocks=BLOCKS, autocast=False, **options):
    """The losses and values of a run, as a list, and its touches. before, after: compile parts of the model before and after wrapping;
    after may return another model to call."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    model = Model(blocks)
    if before is not None:
        before(model, backend)
    units = {name: [name] for name in [*(f"blocks.{i}" for i in range(blocks)), "head"]}
    _, optimizer = wrap(model, place, sluice.AdamW(lr=1e-2), **({"units": units, "held_units": 1} | options))
    made = after(model, backend) if after is not None else None
    called = model if made is None else made
    losses = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(called, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    touches = sluice.torch.engine_of(model).counters().touches
    values = list(values_of(model).values())
    sluice.torch.close(model)
    return losses + values, touches


@functools.cache
def uncompiled(autocast=False, blocks=BLOCKS):
    return trained("memory", autocast=autocast, blocks=blocks)[0]


ALIKE = pytest.mark.long  # another of them shows as much
INDUCTOR = pytest.mark.long  # it compiles C++ for many seconds; two tests of it are left


@pytest.mark.parametrize("when, how, autocasts", [
    ("before", functools.partial(blocks_into, fullgraph=True), True),
    ("before", compile_in_place, False),
    pytest.param("after", compile_whole, False, marks=ALIKE),
    pytest.param("after", blocks_into, True, marks=ALIKE),
    pytest.param("after", compile_in_place, False, marks=ALIKE),
])  # fmt: skip
def test_compiled_models_have_the_bits_of_uncompiled_ones(when, how, autocasts):
    plainly, counted = Counted(), Counted()
    assert same_run(trained("disk", backend=plainly, **{when: how}), uncompiled()) and plainly.graphs > 0
    if autocasts:
        assert same_run(trained("disk", backend=counted, autocast=True, **{when: how}), uncompiled(autocast=True))
        assert counted.graphs == plainly.graphs


def same_run(found, expected):
    values, touches = found
    return same(values, expected) and touches == 0


def test_blocks_with_inductor():
    """It rounds otherwise than what is not compiled."""
    (memory, _), (disk, touches) = (trained(place, before=blocks_into, backend="inductor") for place in ("memory", "disk"))
    assert same(memory, disk) and touches == 0
    losses = [[loss.item() for loss in run[:3]] for run in (memory, uncompiled())]
    assert rounding.near(*losses, rounding.of_losses(rounding.of_model(Model())))


def test_one_graph_of_a_whole_model_is_refused():
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"come and go.*compile its blocks.*fullgraph=True"):
        trained("disk", after=lambda model, backend: torch.compile(model, backend=backend, fullgraph=True))


def test_blocks_that_are_alike_share_one_graph():
    counted = Counted()
    found, _ = trained("memory", before=blocks_into, backend=counted, blocks=MANY, autocast=True, held_units=2)
    assert same(found, uncompiled(True, MANY))
    assert counted.graphs == 2  # the first block's input needs no gradient


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_compiled_blocks_keep_no_casts_of_parameters(backend):
    torch._dynamo.reset()
    model = Model()
    blocks_into(model, backend)
    model, _ = wrap(model, "disk")
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, 0)
    gc.collect()
    kept = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.bfloat16]
    assert loss.requires_grad and [tuple(t.shape) for t in kept if {*t.shape} == {24, 96}] == []
    loss.backward()
    sluice.torch.close(model, values=False)


@INDUCTOR
def test_graphs_have_the_users_passes_under_autocast():
    torch._dynamo.reset()
    ran = []
    model, _ = wrap(nn.Sequential(nn.Linear(64, 64), torch.compile(nn.Linear(64, 64))), "memory")
    with torch._inductor.config.patch(post_grad_custom_post_pass=ran.append), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(64, 64)).float().sum().backward()
    assert ran != []
    sluice.torch.close(model, values=False)


def test_blocks_are_compiled_that_an_estimate_has_run():
    counted = Counted()
    found, _ = trained("memory", before=blocks_into, backend=counted, reserve=None, sample_batch=torch.randn(5, 24))
    assert same(found, uncompiled()) and counted.graphs > 0
