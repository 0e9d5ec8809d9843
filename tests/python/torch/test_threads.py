"""One thread at a time uses a wrapped model; another one is refused at once. A backward pass is of the thread that waits for it."""

import threading

import pytest
import torch
from support.wrapped_models import same, units_of_modules, wrap

import sluice
import sluice.torch

WIDTH = 16


class Does(torch.nn.Module):
    """A model that does something in the midst of its forward pass, and something else in the midst of its backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.in_forward = self.in_backward = lambda: None

    def forward(self, x):
        x = _Does.apply(self.first(x), self.in_backward)
        self.in_forward()
        return self.last(x)


class _Does(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.action()
        return gradient, None


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


def in_thread(action):
    """Runs it in another thread, and raises what it raised."""
    errors = []

    def run():
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for the other thread"
    if errors:
        raise errors[0]


def data(step):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))


def wrapped():
    return wrap(Does(), "memory", units=units_of_modules(Does()), held_units=2)


def gradients(model, loss):
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


USES = [
    lambda model, optimizer, loss: model(data(1)),
    lambda model, optimizer, loss: loss.backward(),
    lambda model, optimizer, loss: optimizer.step(),
    lambda model, optimizer, loss: sluice.torch.full_parameters(model).__enter__(),
    lambda model, optimizer, loss: optimizer.state_dict(),
]


@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_another_thread_is_refused_at_once(where):
    model, optimizer = wrapped()
    expected = gradients(model, model(data(0)).sum())
    for use in USES:
        loss, refused = model(data(1)).sum(), []

        def used_elsewhere(use=use, loss=loss, refused=refused):
            if not refused:
                refused.append(None)
                with pytest.raises(sluice.StateError, match="two threads use one wrapped model at the same time.*one after another"):
                    in_thread(lambda: use(model, optimizer, loss))

        setattr(model, where, used_elsewhere)
        assert same(gradients(model, model(data(0)).sum()), expected) and refused
        in_thread(lambda: gradients(model, model(data(0)).sum()))  # one after another
    sluice.torch.close(model)


def test_a_backward_pass_that_runs_in_another_thread_is_of_the_one_that_waits():
    model, _ = wrapped()
    expected = gradients(model, model(data(0)).sum())
    here, found = threading.get_ident(), []

    def run():
        assert threading.get_ident() != here
        with torch.enable_grad():
            found.append(gradients(model, model(data(0)).sum()))

    deep(run)
    within = [run]
    model.in_forward = lambda: deep(within.pop()) if within else None
    model(data(2))
    assert len(found) == 2 and all(same(each, expected) for each in found)
    sluice.torch.close(model)
