"""After a KeyboardInterrupt the model goes on, and no hook or mode of it is left behind."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from support import rounding
from support.chain import Chain, drawn, loss_of, plain_loop
from support.wrapped_models import plain_optimizer, same_values, units_of_modules, values_of, wrap

import sluice.torch


def hooks_of_saved_tensors():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def interrupted(model, times=1, autocast=False):
    """Calls the model, with Ctrl-C in each call."""

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.middle.register_forward_hook(stop)
    for _ in range(times):
        with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(drawn(0))
    handle.remove()


@pytest.mark.parametrize("autocast", [False, True])
def test_an_interrupt_in_forward_leaves_nothing_behind(autocast):
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    interrupted(model, times=2, autocast=autocast)
    assert hooks_of_saved_tensors() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.is_autocast_cache_enabled()
    plain_loop(model, optimizer, lambda value: None, steps=1)
    interrupted(model)
    sluice.torch.close(model)
    loss_of(model, 0).backward()


def test_a_session_ends_after_an_interrupt():
    model, optimizer = wrap(Chain(), "disk")
    interrupted(model)
    session = weakref.ref(optimizer._session)
    sluice.torch.close(model)
    del model, optimizer
    gc.collect()
    assert session() is None


def test_calls_within_calls_keep_their_hooks():
    """An interrupt that a forward pass catches ends only the call in which it came."""

    class Recursive(Chain):
        inner = True

        def forward(self, x):
            if not self.inner:
                raise KeyboardInterrupt
            self.inner, before = False, hooks_of_saved_tensors()
            with pytest.raises(KeyboardInterrupt):
                self(x)
            self.inner = True
            assert before is not None and hooks_of_saved_tensors() == before
            return super().forward(x)

    def trained(make):
        torch.manual_seed(0)
        model, optimizer = wrap(make(), "disk")
        plain_loop(model, optimizer, lambda value: None, steps=2)
        return values_of(model)

    assert same_values(trained(Recursive), trained(Chain))


class Interrupts:
    """Ctrl-C at the nth call of the engine: right before it, or right after, before anything notes what it did."""

    def __init__(self, engine, monkeypatch):
        self.calls, self.at, self.after, self.came = 0, None, False, ""
        call = engine._handle.call

        def interrupting(function, *arguments):
            at = self.calls == self.at
            self.calls += 1
            if at:
                self.came = function
            if not (at and not self.after):
                call(function, *arguments)
            if at:
                raise KeyboardInterrupt

        monkeypatch.setattr(engine._handle, "call", interrupting)

    def set(self, at, after):
        """Sets the call at which Ctrl-C comes, or None."""
        self.calls, self.at, self.after = 0, at, after


def one_step(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def interrupted_at_each_call(monkeypatch, **options):
    """Does steps that are interrupted, one at each of the engine's calls, before and after it. Yields the model, its
    optimizer, the step and the call."""
    torch.manual_seed(0)
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()), held_units=2, **options)
    interrupts = Interrupts(sluice.torch.engine_of(model), monkeypatch)
    one_step(model, optimizer, 0)
    interrupts.set(None, False)
    one_step(model, optimizer, 1)
    calls = interrupts.calls
    for step, (at, after) in enumerate(itertools.product(range(calls), [False, True]), 2):
        interrupts.set(at, after)
        with contextlib.suppress(KeyboardInterrupt):  # after another interrupt a step may have fewer calls than n
            one_step(model, optimizer, step)
        interrupts.set(None, False)
        yield model, optimizer, step, interrupts.came
    sluice.torch.close(model)


def test_an_interrupt_between_the_engine_and_what_is_noted(monkeypatch):
    """An interrupted step was done or not, and the next ones are those of plain PyTorch."""
    torch.manual_seed(0)
    plain = Chain()
    its_optimizer = plain_optimizer(plain)
    for step in (0, 1):
        one_step(plain, its_optimizer, step)
    epsilon = rounding.of_model(plain, rows=6)
    seen, before = set(), values_of(plain)
    for model, optimizer, step, came in interrupted_at_each_call(monkeypatch):
        seen.add(came)
        undone, values = values_of(plain), values_of(model)
        if any(rounding.distance(values[name], undone[name]) > 1e-3 / 2 for name in values):  # a step changes values by more than 1e-3
            one_step(plain, its_optimizer, step)
        one_step(model, optimizer, 1000 + step)
        one_step(plain, its_optimizer, 1000 + step)
        there = values_of(model)
        for name, expected in values_of(plain).items():
            found = there[name]
            rounding.assert_moved_alike(found, expected, before[name], epsilon, f"{came}, {name}")
            plain.get_parameter(name).data.copy_(found)
        before = values_of(plain)
    functions = "acquire", "release", "begin_step", "add_gradient", "drop_gradient", "step"
    assert {f"sluice_engine_{name}" for name in functions} <= seen


def test_an_interrupt_where_updates_are_made_in_backward(monkeypatch):
    """Any part of an interrupted step may be done; the next step works."""
    calls = []
    for model, optimizer, step, came in interrupted_at_each_call(monkeypatch, update_in_backward=True):
        calls.append(came)
        one_step(model, optimizer, 1000 + step)
        updates = [sluice.torch.engine_of(model).updates(name) for name, _ in model.named_parameters()]
        one_step(model, optimizer, 2000 + step)
        again = [sluice.torch.engine_of(model).updates(name) for name, _ in model.named_parameters()]
        assert again == [count + 1 for count in updates], came
    assert "sluice_engine_add_gradient" in calls
