"""Autograd keeps tensors of a model that is wrapped on a GPU where other hooks of saved tensors than the model's are in force, or none:
its units have gone when backward needs them. The GPU is the fake one of the tests; the reference is the same model on the CPU."""

import functools

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, check_twin, least
from support.wrapped_models import units_of_modules, wrap
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import sluice
import sluice.torch

WIDTH = 32


def drawn(step):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


class Stack(torch.nn.Module):
    """More layers than may be held. around(part, x) applies a part of the model."""

    def __init__(self, around=lambda part, x: part(x), parts=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.around, self.parts = around, parts

    def forward(self, x):
        each = len(self.layers) // self.parts
        for first in range(0, len(self.layers), each):

            def part(x, first=first):
                for layer in self.layers[first : first + each]:
                    x = torch.tanh(layer(x))
                return x

            x = self.around(part, x)
        return x


def loss_of(model, step):
    return model(drawn(step).requires_grad_()).square().mean()


@functools.cache
def least_memory(held_units):
    """The least device_memory for such a model: its units share the room of those that are held."""

    def plan_with(device_memory):
        given = {"units": units_of_modules(Stack()), "held_units": held_units, "place": "memory", "memory": "6GiB"}
        sluice.torch.plan(Stack(), sluice.AdamW(lr=1e-3), device_facts=fake_gpu.FACTS, **given, **GPU | {"device_memory": device_memory})

    with fake_gpu.shared():
        return least(plan_with, 1024) << 20


def check_on_gpu(make, loss=loss_of, held_units=3, **options):
    given = {"device_memory": least_memory(held_units), "device_facts": fake_gpu.FACTS}
    check_twin(make, loss, places=["memory", "memory"], steps=2, held_units=held_units, on_gpu_only=given, **options)


def test_a_backward_pass_that_makes_a_graph_is_refused():
    with fake_gpu.shared():
        model, _ = wrap(Stack(), "memory", units=units_of_modules(Stack()), **GPU)
        x = drawn(0).requires_grad_()
        output = model(x).sum()
        (expected,) = torch.autograd.grad(output, x, retain_graph=True)
        with pytest.raises(sluice.StateError, match=r"makes a graph \(create_graph=True\).*wrap the model on the CPU"):
            torch.autograd.grad(output, x, create_graph=True)
        assert torch.equal(torch.autograd.grad(output, x)[0], expected)
        sluice.torch.close(model, values=False)
        del output


# ---- hooks of others within a call ----


def computed_again(part, x):
    return checkpoint(part, x, use_reentrant=False)


def computed_again_within(part, x):
    return checkpoint(part, x, use_reentrant=True)


def kept_by_users_hooks(part, x):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return part(x)


def kept_on_the_cpu(part, x):
    with save_on_cpu():
        return part(x)


def kept_twice(part, x):
    return kept_by_users_hooks(lambda x: computed_again(part, x), x)


def loss_under_autocast(model, step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, step)


@pytest.mark.parametrize("around, loss", [
    (computed_again_within, loss_of), (kept_on_the_cpu, loss_of), (kept_twice, loss_of),
    (computed_again, loss_under_autocast), (kept_by_users_hooks, loss_under_autocast),
])  # fmt: skip
def test_units_are_there_in_parts_that_others_keep_or_compute_again(around, loss):
    check_on_gpu(lambda: Stack(around), loss)


class Block(torch.nn.Module):
    """Computes what it does itself again in backward, without a call of the module, as layers of transformers do."""

    def __init__(self):
        super().__init__()
        self.gain, self.bias = (torch.nn.Parameter(torch.full((WIDTH,), value)) for value in (1.5, 0.5))

    def forward(self, x):
        return checkpoint(lambda x: torch.tanh(x * self.gain + self.bias), x, use_reentrant=False)


def test_a_unit_is_there_where_the_model_returns_what_its_last_block_returns():
    check_twin(
        lambda: torch.nn.Sequential(torch.nn.Sequential(*(Block() for _ in range(6)))), loss_of, places=["memory", "memory"], steps=2,
        units={f"block.{i}": [f"0.{i}"] for i in range(6)}, held_units=3, on_gpu_only={"device_facts": fake_gpu.FACTS},
    )  # fmt: skip
