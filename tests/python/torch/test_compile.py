"""torch.compile of wrapped models and their blocks gives the same numbers, with graphs that break where parameters come
and go; one graph of a whole model is refused, with what to do instead."""

import functools
import gc
import subprocess
import sys

import pytest
import torch
from support import fake_gpu, rounding
from support.graphs import Counted
from support.sluice_process import BUILD, PACKAGE
from support.wrapped_models import same, values_of, wrap
from torch import nn

import sluice.torch

BLOCKS = 2
MANY = 12  # more blocks than torch.compile() makes graphs of one function (torch._dynamo.config.recompile_limit)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks=BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
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


def blocks_in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


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
INDUCTOR = pytest.mark.long  # it compiles C++ for many seconds; one test of it is left


@pytest.mark.parametrize("when, how, autocasts", [
    ("before", functools.partial(blocks_into, fullgraph=True), True),
    ("before", compile_in_place, False),
    ("after", compile_whole, False),
    pytest.param("before", blocks_in_place, True, marks=ALIKE),
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


def test_evaluation_between_steps_of_compiled_blocks():
    torch._dynamo.reset()
    torch.manual_seed(4)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    blocks_into(model, "aot_eager")
    _, optimizer = wrap(model, "disk", units={f"b{i}": [f"blocks.{i}"] for i in range(BLOCKS)}, held_units=1)
    for step in range(2):
        with torch.no_grad():
            assert rounding.near(loss_of(model, step).item(), loss_of(plain, step).item(), rounding.of_model(plain))
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
        plain.load_state_dict(saved)
    sluice.torch.close(model)


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
    assert loss.requires_grad and [tuple(t.shape) for t in kept if {*t.shape} == {24, 48}] == []
    loss.backward()
    sluice.torch.close(model, values=False)


class Scales(nn.Module):
    """A block that uses a buffer of its weight's shape, and may write it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 24)
        self.register_buffer("scale", torch.eye(24) * 2)

    def forward(self, x):
        return self.up(x) @ self.scale

    def after(self):
        """Comes after the model's call."""


class DecaysInAnotherGraph(Scales):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        self.scale.data.mul_(0.5)
        return y


class UsesAnother(Scales):
    """A block that is no part of the model is used, too, by the same graph, and its parameter is written."""

    def __init__(self):
        super().__init__()
        self.others = [Scales(), Scales()]

    def forward(self, x):
        return self.others[1](self.others[0](super().forward(x)))

    def after(self):
        for other in self.others:
            with torch.no_grad():
                other.up.weight.mul_(0.5)


def gradients_of_compiled(make, wrapped):
    """The gradients of the input and parameters of a model with a block that inductor compiles. They are the same whether it is wrapped."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = make()
    model = nn.Sequential(nn.Linear(24, 24), torch.compile(block))
    if wrapped:
        model, _ = wrap(model, "memory")
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        kept = {(*t.shape,) for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.bfloat16}
    block.after()
    found = torch.autograd.grad(y.float().sum(), [x, *model.parameters()])
    if wrapped:
        found = [g.clone() for g in found]
        sluice.torch.close(model, values=False)
    return found, kept


@pytest.mark.parametrize("make", [pytest.param(DecaysInAnotherGraph, marks=INDUCTOR), UsesAnother])
def test_what_is_written_is_not_cast_again_under_autocast(make):
    assert same(gradients_of_compiled(make, True)[0], gradients_of_compiled(make, False)[0])


class Parts(nn.Module):
    """A block that uses parts of parameters and of their casts, on both sides of a graph break."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2)
        self.rows = nn.Parameter(torch.randn(14, 24))
        self.layers = nn.Parameter(torch.randn(3, 7, 7))

    def forward(self, x):
        x = x + self.attention(x, x * 2, x * 2)[0]
        torch._dynamo.graph_break()
        x = nn.functional.linear(x, self.rows[::2]) @ self.layers[1]
        return x @ self.layers.to(torch.bfloat16)[2].t() + x[:, :2] @ self.layers.to(torch.bfloat16)[:2, 0]

    def after(self):
        pass


@INDUCTOR
def test_compiled_blocks_keep_no_casts_of_parts_of_parameters():
    found, kept = gradients_of_compiled(Parts, True)
    expected, kept_else = gradients_of_compiled(Parts, False)
    assert same(found, expected)
    assert kept & {(24, 24), (7, 24), (24, 7)} == set() < kept_else & {(24, 24), (7, 24), (24, 7)}


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


@fake_gpu.cpu_alone("a function that is compiled looks at all parameters, which are not there between calls")
@pytest.mark.long
def test_a_step_may_be_compiled_too():
    """Graphs break where the engine has the gradients, and updates."""

    def trained_by(compiled):
        torch._dynamo.reset()
        torch.manual_seed(4)
        model, optimizer = wrap(Model(), "disk", sluice.AdamW(lr=1e-2), held_units=2)

        def step(number):
            loss = loss_of(model, number)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach().clone()

        run = torch.compile(step, backend="aot_eager") if compiled else step
        found = [run(number) for number in range(2)] + list(values_of(model).values())
        sluice.torch.close(model)
        return found

    assert same(trained_by(True), trained_by(False))


NEEDS_NO_COMPILER = """
import sys
import sluice.torch, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
model, _ = sluice.torch.wrap(model, memory="2GiB", reserve="160MiB")
with torch.no_grad():
    model(torch.ones(2, 8))
sluice.torch.close(model)
assert "torch._dynamo" not in sys.modules
"""


def test_who_compiles_nothing_does_not_wait_for_the_compiler():
    """It takes as long to import as the rest of PyTorch, whose optimizers load it themselves."""
    environment = {"PYTHONPATH": str(PACKAGE), "SLUICE_LIBRARY_PATH": str(BUILD / "lib"), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run([sys.executable, "-c", NEEDS_NO_COMPILER], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
