"""Models on a GPU, the fake one of the tests, and threads that use them at the same time."""

import contextlib
import faulthandler
import gc
import random
import sys
import tempfile
import threading
import time

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU
from support.wrapped_models import units_of_modules, wrap

import sluice.torch

WIDTH = 16


def pause():
    """Lets other threads run, between what brings a parameter in and what uses it."""
    time.sleep(random.choice([0, 0, 1e-4, 5e-4, 3e-3]))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        turned = weight.t()
        pause()
        return x @ turned

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        pause()
        return gradient @ weight, gradient.t() @ x


class Paused(torch.nn.Linear):
    """A module that lets other threads run where these might take the room of what it is about to use."""

    def forward(self, x):
        return torch.tanh(_Product.apply(x, self.weight)) + self.bias


class Model(torch.nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = torch.nn.ModuleList(Paused(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@contextlib.contextmanager
def wrapped(count=1, make=Model, optimizer=None, **options):
    """Models with their optimizers on a GPU, where as few units are held as may be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with fake_gpu.shared():
            made = []
            for _ in range(count):
                torch.manual_seed(3)
                model = make()
                made.append(wrap(model, "memory", optimizer, units=units_of_modules(model), held_units=1, **GPU, **options))
            yield made if count > 1 else made[0]
            for model, _ in made:
                sluice.torch.close(model)
            del made, model
            gc.collect()
    finally:
        sys.setswitchinterval(before)


def in_threads(*actions, seconds=60):
    """Runs the actions at the same time, each in a thread of its own, and raises what one of them raised. Where they have not
    ended after so many seconds, which is a deadlock, it fails with what all threads do."""
    errors = []

    def run(action):
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        with tempfile.TemporaryFile("w+") as text:
            faulthandler.dump_traceback(text, all_threads=True)
            text.seek(0)
            pytest.fail(f"threads wait for each other\n{text.read()}")
    if errors:
        raise errors[0]


class Stops(Model):
    """A model that does something within its forward, between its modules."""

    stop = staticmethod(lambda: None)

    def forward(self, x):
        x = self.layers[0](x)
        self.stop()
        return super().forward(x)


class _Deep(torch.autograd.Function):
    """Its backward pass is within others, deeper than PyTorch goes in one thread, and ends with an action: a CPU's backward passes
    run in the thread that calls backward(), but for these, which run in another one, as all of a GPU do."""

    @staticmethod
    def forward(ctx, x, depth, action):
        ctx.depth, ctx.action = depth, action
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth == 0:
            ctx.action()
        else:
            deep(ctx.action, ctx.depth - 1)
        return gradient, None, None


def deep(action, depth=70):
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(_Deep.apply(x, depth, action), x)


def elsewhere(action):
    """Runs the action in a backward pass in another thread, and returns what it returned."""
    here, found = threading.get_ident(), []

    def run():
        assert threading.get_ident() != here
        with torch.enable_grad():
            found.append(action())

    deep(run)
    return found[0]


def turns_of(model):
    return model.layers[0].weight._sluice.presence.turns


def looks(turns):
    """Returns a list that grows with each look at who has the turn, of threads that wait for it."""
    found, look = [], turns._drop_gone
    turns._drop_gone = lambda: (found.append(None), look())
    return found


def until(condition):
    while not condition():
        time.sleep(1e-3)


def data(seed):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def called(model, seed):
    with torch.no_grad():
        return [model(data(seed))]


def one_module_called(model, seed):
    with torch.no_grad():
        return [model.layers[seed % len(model.layers)](data(seed))]


def differentiated(model, seed):
    return list(torch.autograd.grad(model(data(seed)).square().sum(), list(model.parameters())))
