"""Models on a GPU whose units are away: nothing shows them by chance outside of calls of their modules and their backward. The GPU is
the fake one of the tests."""

import contextlib

import pytest
import torch
from support import fake_gpu
from support.gpu_models import least
from support.wrapped_models import same, units_of_modules, wrap

import sluice
import sluice.torch

LAYERS, WIDTH = 12, 16


class Ways(torch.nn.Module):
    """Layers of which each is a unit. `between` comes after each of them, with the layer's number and what it gave."""

    between = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.between is not None:
                x = self.between(number, x)
        return x


def inputs(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


@contextlib.contextmanager
def wrapped(held_units=2, make=Ways, register=None):
    """register: comes before the model is wrapped, with it."""
    with fake_gpu.shared():
        model = make()
        if register is not None:
            register(model)
        given = {"units": units_of_modules(model), "held_units": held_units, "device_facts": fake_gpu.FACTS, "reserve": "64MiB"}

        def plan_with(device_memory):
            sluice.torch.plan(model, sluice.SGD(lr=0.1), memory="6GiB", place="memory", device_memory=device_memory, **given)

        # With the least for which there is a plan, a unit that has gone leaves nothing where it was.
        model, _ = wrap(model, "memory", sluice.SGD(lr=0.1), device_memory=least(plan_with, 1024) << 20, **given)
        yield model
        sluice.torch.close(model, values=False)


def results(model):
    """Losses and gradients of some steps."""
    found = []
    for step in range(2):
        loss = model(inputs(step)).sum()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad + 0 for p in model.parameters())]
        model.zero_grad()
    return found


# ---- outside of calls ----

OUTSIDE = r"is used by .* where its unit .* is not on the GPU: it is there in calls of 'layers.*full_parameters\(model\)"


def test_what_a_call_of_a_module_has_used_is_not_there_after_it():
    with wrapped() as model:
        for _ in range(2):
            x = model.layers[0](inputs(0))
            with pytest.raises(sluice.StateError, match=f"'layers.0.weight' {OUTSIDE}"):
                x @ model.layers[0].weight.t()
            del x
        with torch.no_grad():
            model(inputs(0))
            with pytest.raises(sluice.StateError, match=OUTSIDE):
                model.layers[-1].weight.sum()


def fails(gradient):
    raise ValueError("on purpose")


@pytest.mark.parametrize("hook", [None, fails], ids=["ends", "fails"])
def test_what_a_backward_pass_has_used_is_not_there_after_it(hook):
    with wrapped() as model:
        for _ in range(2):
            loss = model(inputs(0)).sum()
            if hook is not None:
                model.layers[1].weight.register_hook(hook)
            with contextlib.nullcontext() if hook is None else pytest.raises(ValueError, match="on purpose"):
                loss.backward()
            for layer in model.layers:
                with pytest.raises(sluice.StateError, match=OUTSIDE):
                    layer.weight.detach()


# ---- hooks of the module that is called ----


def before(module, args):
    return args[0] * module.weight.mean()


def after(module, args, output):
    return output + module.bias.mean()


@pytest.mark.parametrize("later", [True, False])
def test_hooks_of_what_is_called_belong_to_the_call(later):
    """later: the hooks are registered after the model was wrapped."""

    def register(model):
        for each in model.layers:
            each.register_forward_pre_hook(before)
            each.register_forward_hook(after)

    expected = Ways()
    register(expected)
    with wrapped(register=None if later else register) as model:
        if later:
            register(model)
        found = results(model)
    assert same(found, results(expected))
