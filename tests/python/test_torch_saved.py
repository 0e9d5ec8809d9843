"""What autograd keeps of a wrapped model's parameters, in whatever form an operation took them: references, from which
backward has the same bits."""

import gc

import accelerate
import pytest
import torch
from test_torch_autograd import WIDTH, drawn, plain_loop
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode
from wrapped_models import check_as_plain, outcome, units_of_modules, wrap


class Parts(nn.Module):
    """Parts of parameters, in several ways."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.1)
        self.layers = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

    def forward(self, x):
        x = nn.functional.linear(x, self.rows[WIDTH:])
        x = nn.functional.linear(x, self.rows[::2]) @ self.layers[1]
        return (x @ self.layers.to(torch.bfloat16)[2].t() + x[:, :3] @ self.layers[:, 0]).tanh()


class CrossAttention(nn.Module):
    """nn.MultiheadAttention cuts its weight in two where keys come from elsewhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x[None, :2], x[None, 2:])


@pytest.mark.parametrize("make", [Parts, CrossAttention])
def test_autocast_of_parts_of_parameters(make):
    def loop(model, optimizer, note):
        x = drawn(0).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(3).mean()
        loss.backward()
        note(loss)
        note(x.grad)
        for p in model.parameters():
            note(p.grad)

    plain = outcome(None, make, loop)
    for place in ("memory", "disk"):
        for found, expected in zip(outcome(place, make, loop), plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Complex(nn.Module):
    """Parameters that are seen as complex numbers, also conjugated, and parts of them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, 2))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, 2) * 0.2)

    def forward(self, x):
        mix = torch.view_as_complex(self.mix)
        x = x.to(torch.complex64) * torch.view_as_complex(self.scale).conj()
        x = (x @ mix.mH) * mix[3].conj().imag
        return x.abs()


def test_parameters_that_are_seen_as_another_type():
    check_as_plain(Complex, plain_loop)


class Deep(nn.Module):
    """One layer is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        return self.layers(x).float()


class CastsInside(Deep):
    """As PyTorch's documentation has it; in the middle a mode of the model's own, which ends before its module."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        for layer in self.layers:
            with FlopCounterMode(display=False):
                x = layer(x)
        return x.float()


class CastsOfItsOwn(nn.Module):
    """A module that turns autocast on in its own forward, of which it is a part."""

    def __init__(self):
        super().__init__()
        self.inner = CastsInside()

    def forward(self, x):
        return self.inner(x)


def prepared_by_accelerate(model):
    optimizer = wrap(model, "disk", units=units_of_modules(model))[1]
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model, optimizer)[0]


def wrapped_alone(model):
    return wrap(model, "disk", units=units_of_modules(model))[0]


@pytest.mark.parametrize(
    "make, prepare",
    [(CastsInside, wrapped_alone), (CastsOfItsOwn, wrapped_alone), (Deep, prepared_by_accelerate)],
    ids=["@autocast", "@autocast of a part", "Accelerate"],
)
def test_autocast_inside_of_forward_keeps_no_copies_of_parameters(make, prepare):
    model = prepare(make())
    loss = model(drawn(0).requires_grad_()).square().mean()
    assert torch.is_autocast_cache_enabled() and _get_current_dispatch_mode() is None
    gc.collect()
    copies = [
        t for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.dtype == torch.bfloat16 and tuple(t.shape) == (WIDTH, WIDTH)
    ]  # fmt: skip
    assert not copies and loss.requires_grad


@pytest.mark.parametrize("make", [CastsInside, CastsOfItsOwn])
def test_autocast_inside_of_forward(make):
    def loop(model, optimizer, note):
        for step in range(3):
            x = drawn(step).requires_grad_()
            model(x).pow(3).mean().backward()
            note(x.grad)
            for p in model.parameters():
                if p.requires_grad:
                    note(p.grad)
            optimizer.zero_grad()

    check_as_plain(make, loop)
