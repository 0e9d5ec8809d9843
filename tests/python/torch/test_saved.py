"""Autograd keeps references to a wrapped model's parameters, in whatever form operations take them, and backward has the
same bits."""

import gc

import accelerate
import pytest
import torch
from support import fake_gpu, rounding
from support.chain import WIDTH, Chain, drawn, loss_of
from support.wrapped_models import TERMS, check_as_plain, outcome, same, units_of_modules, wrap
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

KEPT_ITSELF = fake_gpu.cpu_alone(
    "without hooks autograd keeps parameters themselves, which backward would not find on a GPU; such calls are a StateError there"
)
OF_USES = rounding.of_roundings(16)  # more uses than any parameter here has


class Parts(nn.Module):
    """A model that uses views of parameters, in several ways."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.1)
        self.layers = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

    def forward(self, x):
        x = nn.functional.linear(x, self.rows[WIDTH:])
        x = nn.functional.linear(x, self.rows[::2]) @ self.layers[1]
        return (x @ self.layers.to(torch.bfloat16)[2].t() + x[:, :3] @ self.layers[:, 0]).tanh()


class CrossAttention(nn.Module):
    """nn.MultiheadAttention cuts its weight in two where keys are not the queries."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x[None, :2], x[None, 2:])


def step_under_autocast(model, optimizer, note):
    x = drawn(0).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().pow(3).mean()
    loss.backward()
    note(loss)
    note(x.grad)
    for p in model.parameters():
        note(p.grad)


@pytest.mark.parametrize("make", [Parts, CrossAttention])
def test_autocast_of_parts_of_parameters(make):
    plain = outcome(None, make, step_under_autocast)
    for place in ("memory", "disk"):
        for found, expected in zip(outcome(place, make, step_under_autocast), plain, strict=True):
            # Both use the same kernels on the same values, and differ in the order in which a parameter's uses are added.
            rounding.assert_near(found, expected, OF_USES, terms=TERMS)


class Deep(nn.Module):
    """A model of which one layer is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        return self.layers(x).float()


class CastsInside(Deep):
    """Autocast inside of forward, as in PyTorch's documentation, and in the middle a mode of the model's own, which ends
    before its module."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        for layer in self.layers:
            with FlopCounterMode(display=False):
                x = layer(x)
        return x.float()


def prepared_by_accelerate(model):
    optimizer = wrap(model, "disk", units=units_of_modules(model))[1]
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model, optimizer)[0]


def wrapped_alone(model):
    return wrap(model, "disk", units=units_of_modules(model))[0]


@pytest.mark.parametrize(
    "make, prepare",
    [(CastsInside, wrapped_alone), (Deep, prepared_by_accelerate)],
    ids=["@autocast", "Accelerate"],
)
def test_autocast_inside_of_forward_keeps_no_copies_of_parameters(make, prepare):
    model = prepare(make())
    loss = model(drawn(0).requires_grad_()).square().mean()
    assert torch.is_autocast_cache_enabled() and _get_current_dispatch_mode() is None
    assert not copies() and loss.requires_grad


def copies():
    """The copies of parameters in bf16 that there are. Fakes, which have no memory, are of graphs that other tests compiled."""
    gc.collect()
    return [
        t for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and not issubclass(type(t), FakeTensor)
        and t.dtype == torch.bfloat16 and tuple(t.shape) == (WIDTH, WIDTH)
    ]  # fmt: skip


class Twice(Deep):
    """Each parameter is used twice, and autocast's own cache would add the gradients of both uses in bf16."""

    def forward(self, x):
        return self.layers(self.layers(x)).float()


@fake_gpu.cpu_alone("a plan for a GPU does not change, so that casts never get room")
@pytest.mark.parametrize("make", [Parts, Twice, CastsInside])
def test_where_there_is_room_autograd_keeps_casts_and_bits_are_the_same(make):
    def loop(model, optimizer, note):
        for step in range(3):
            x = drawn(step).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(x).float().pow(3).mean().backward()
            note(x.grad)
            optimizer.step()
            optimizer.zero_grad()

    assert same(outcome("memory", make, loop, reserve=None), outcome("disk", make, loop))


def test_autocast_inside_of_forward():
    def loop(model, optimizer, note):
        for step in range(3):
            x = drawn(step).requires_grad_()
            model(x).pow(3).mean().backward()
            note(x.grad)
            for p in model.parameters():
                if p.requires_grad:
                    note(p.grad)
            optimizer.zero_grad()

    check_as_plain(CastsInside, loop)


# ---- hooks of others ----


class Counted(Chain):
    """A layer that counts how often it was called."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_checkpoint_around_the_model(autocast):
    def loop(model, optimizer, note):
        model.calls = 0
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = checkpoint(model, drawn(step), use_reentrant=False).float().square().mean()
            loss.backward()
            note(loss)
            note(model.first.weight.grad)
            optimizer.zero_grad()
        note(float(model.calls))

    check_as_plain(Counted, loop)


def test_hooks_of_the_users_own_get_all_but_parameters():
    def kept_by_users_hooks(model):
        kept = []

        def pack(tensor):
            kept.append(tensor.clone())
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: kept[i]):
            loss = loss_of(model, 0)
        loss.backward()
        return kept, [p.grad.clone() for p in model.parameters()]

    model = Chain()
    kept, gradients = kept_by_users_hooks(model)
    model.zero_grad()
    weights = [model.first.weight, model.middle.weight.t(), model.last.weight.t()]
    expected = [k for k in kept if not any(k.shape == w.shape and torch.equal(k, w) for w in weights)]
    assert 0 < len(expected) < len(kept)
    wrap(model, "disk")
    found, gradients_found = kept_by_users_hooks(model)
    assert same(found, expected) and same(gradients_found, gradients)


@KEPT_ITSELF
def test_where_hooks_are_not_allowed():
    """In transforms, autograd keeps parameters themselves, which are brought in when they are touched."""
    x = drawn(0)

    def loop(model, optimizer, note):
        values = {name: p.detach() for name, p in model.named_parameters()}
        gradients = torch.func.grad(lambda given: torch.func.functional_call(model, given, x).square().sum())(values)
        for name in values:
            note(gradients[name])
        note(torch.func.grad(lambda x: model(x).square().sum())(x))
        output, pull = torch.func.vjp(model, x)
        note(output)
        note(pull(torch.ones_like(output))[0])
        note(torch.func.jacrev(model)(x[0]))
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            loss = loss_of(model, 1)
        loss.backward()
        note(loss)
        optimizer.step()

    check_as_plain(Chain, loop)
