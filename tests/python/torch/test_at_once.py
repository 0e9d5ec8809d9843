"""update_in_backward: the bits of updates at step(), no memory for gradients, and errors for what needs them."""

import functools

import pytest
import torch
from support.chain import Chain, loss_of
from support.user_models import SHOWN
from support.wrapped_models import (
    language_loss, outcome, same, same_values, small_gpt2, tokens, train, units_of_modules, update, values_of, wrap,
)  # fmt: skip

import sluice
import sluice.torch

at_once = functools.partial(wrap, update_in_backward=True)


def loop(model, optimizer, note, loss_of=language_loss, set_to_none=True):
    for step in range(2):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        note(loss)


def checkpointed(reentrant):
    model = small_gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.get_input_embeddings().requires_grad_(True)
    model.enable_input_require_grads()
    return model


def frozen():
    model = small_gpt2()
    model.transformer.h[0].requires_grad_(False)
    return model


def bf16():
    return small_gpt2().to(torch.bfloat16)


def scheduled(model, optimizer, note):
    """The scheduler counts even if it steps after the forward pass."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        loss = language_loss(model, step)
        if step:
            scheduler.step()
        update(optimizer, loss)
        note(loss)


RUNS = {  # the models: routed, with buffers; and GPT-2, whose head is tied
    name: (SHOWN[name].make, functools.partial(loop, loss_of=SHOWN[name].loss), {}) for name in ("mixtral", "resnet")
} | {
    "Lion in bf16": (bf16, loop, {"optimizer": sluice.Lion(lr=1e-4)}),
    "checkpointed": (functools.partial(checkpointed, False), loop, {}),
    "checkpointed by reentrant passes": (functools.partial(checkpointed, True), loop, {}),
    "frozen": (frozen, loop, {}),
    "scheduled": (small_gpt2, scheduled, {}),
    "set to zero": (small_gpt2, functools.partial(loop, set_to_none=False), {}),
}


@pytest.mark.parametrize("make, loop, options", RUNS.values(), ids=RUNS)
def test_the_bits_are_those_of_updates_at_the_step(make, loop, options):
    expected = outcome("memory", make, loop, **options)
    for place in ("memory", "disk"):
        assert same(outcome(place, make, loop, update_in_backward=True, **options), expected), place


class Failing(torch.autograd.Function):
    """The identity, whose backward raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if Failing.armed:
            raise ArithmeticError("in the middle of backward")
        return gradient


def test_after_an_exception_in_the_middle_of_backward_the_next_step_works():
    def run(place):
        model, optimizer = at_once(small_gpt2(), place)
        engine = sluice.torch.engine_of(model)
        model.transformer.h[1].register_forward_hook(lambda block, args, out: Failing.apply(out))
        seen = []
        for step in range(4):
            loss = language_loss(model, step)
            Failing.armed = step in (1, 2)
            if Failing.armed:
                with pytest.raises(ArithmeticError):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        updates = {name: engine.updates(name) for name, _ in model.named_parameters()}
        assert updates["transformer.h.0.ln_1.weight"] == 2 and updates["transformer.h.2.ln_1.weight"] == 4
        return seen, values_of(model)

    (losses, values), (on_disk, values_on_disk) = run("memory"), run("disk")
    assert losses == on_disk and same_values(values, values_on_disk)


def test_gradients_take_no_place():
    model, _ = at_once(small_gpt2(), "disk")
    plan = sluice.torch.engine_of(model).plan()
    assert {unit["gradient"] for unit in plan["units"]} == {"none"}
    assert plan["bytes"]["disk"]["gradient"] == 0


def test_what_needs_gradients_is_refused():
    model, optimizer = at_once(small_gpt2(), "memory")
    language_loss(model, 0).backward()
    with pytest.raises(sluice.StateError, match="applied in backward.*Clipping.*without update_in_backward"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(sluice.StateError, match="gradient accumulation.*zero_grad"):
        language_loss(model, 1).backward()
    with pytest.raises(sluice.StateError, match="applied in backward"):
        print(model.lm_head.weight.grad.sum())
    optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(language_loss(model, 2)).backward()
    with pytest.raises(sluice.StateError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    assert train(model, optimizer, language_loss, steps=2).values


def test_a_step_needs_a_backward():
    _, optimizer = at_once(small_gpt2(), "memory")
    with pytest.raises(sluice.StateError, match="call backward"):
        optimizer.step()
    with pytest.raises(sluice.InvalidArgumentError, match="without an optimizer"):
        sluice.torch.wrap(small_gpt2(), memory="6GiB", update_in_backward=True)


def test_backward_without_a_step_is_applied_too():
    def run(call_step):
        model, optimizer = at_once(small_gpt2(), "memory")
        for step in range(3):
            language_loss(model, step).backward()
            if call_step:
                optimizer.step()
            optimizer.zero_grad()
        return values_of(model)

    assert same_values(run(False), run(True))


def test_a_gradient_that_is_not_finite_names_its_parameter():
    model, optimizer = at_once(small_gpt2(), "memory")
    with pytest.raises(sluice.NotFiniteError, match="is not finite"):
        (language_loss(model, 0) * float("inf")).backward()
        optimizer.step()  # where a GPU updates, backward() does not wait to learn of it
    optimizer.zero_grad()
    assert all(loss == loss for loss in train(model, optimizer, language_loss, steps=2).values)


def test_backward_through_what_a_backward_changed_is_an_error():
    model, _ = at_once(small_gpt2(), "memory")
    ids = tokens(0)
    first, second = model(ids, labels=ids).loss, model(ids, labels=ids).loss
    first.backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="was changed"):
        second.backward()


def test_what_is_read_after_a_step_is_what_the_step_made():
    # The model is small, so that the writes of a step last into the next.
    model, optimizer = at_once(Chain(), "disk", units=units_of_modules(Chain()), held_units=2)
    for step in range(30):
        before = values_of(model)
        update(optimizer, loss_of(model, step))
        read = values_of(model)
        assert same_values(read, values_of(model))
        assert not any(torch.equal(read[name], before[name]) for name in before)
    sluice.torch.close(model)
