"""Wrapped models in float16 with torch.amp.GradScaler, and clipping by value."""

import pytest
import torch
from support import rounding
from support.wrapped_models import language_loss, same_values, small_gpt2, train, units_of_modules, values_of, wrap

import sluice
import sluice.torch

STEPS, OVERFLOWS = 7, (0, 4)


def scaled_loop(model, scaler, step_of):
    seen = []
    for step in range(STEPS):
        loss = language_loss(model, step)
        scaler.scale(loss * (1e6 if step in OVERFLOWS else 1.0)).backward()
        step_of(scaler)
        scaler.update()
        seen += [loss.item(), scaler.get_scale()]
    return seen


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)


def wrapped(place, **options):
    model = small_gpt2().half()
    units = units_of_modules(model)
    model, optimizer = wrap(model, place, sluice.AdamW(lr=1e-3), units=units, held_units=2, **options)

    overflows = []
    optimizer.register_step_pre_hook(lambda o, *_: overflows.append(float(o.found_inf) != 0))

    def step_of(scaler):
        before = values_of(model)
        scaler.step(optimizer)
        optimizer.zero_grad()
        assert same_values(values_of(model), before) == overflows[-1], "a skipped step, and no other, changes nothing"

    seen = scaled_loop(model, new_scaler(), step_of)
    assert [step for step, skipped in enumerate(overflows) if skipped] == list(OVERFLOWS)
    engine = sluice.torch.engine_of(model)
    updates = {engine.updates(span) for span in ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight")}
    sluice.torch.close(model)
    return seen, values_of(model), updates


def plain():
    """The same with f32 masters by hand, since torch.optim updates float16 in place, and loses small changes."""
    model = small_gpt2().half()
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)

    def step_of(scaler):
        for master, p in zip(masters.values(), model.parameters(), strict=True):
            master.grad = p.grad.float()
        scaler.step(optimizer)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        model.zero_grad()

    return scaled_loop(model, new_scaler(), step_of), values_of(model)


def test_float16_with_gradscaler_has_the_same_bits_in_memory_and_on_disk_and_follows_pytorch():
    memory, values, updates = wrapped("memory")
    disk, on_disk, _ = wrapped("disk")
    assert memory == disk and same_values(values, on_disk)
    assert updates == {STEPS - len(OVERFLOWS)}
    expected, reference = plain()
    assert memory[1::2] == expected[1::2], "another schedule of scales"
    assert sum(b < a for a, b in zip(memory[1::2], memory[3::2], strict=False)) == 1  # the overflow that is not the first step's
    # The gradients are PyTorch's own; updates differ by roundings of f32, which now and then change one to f16.
    start = small_gpt2().half()
    epsilon = rounding.of_model(start)
    assert rounding.near(memory[::2], expected[::2], rounding.of_losses(rounding.of_mean(epsilon, 64)))
    assert {p.dtype for p in values.values()} == {torch.float16}
    for name, found in values.items():
        three = found, reference[name], start.get_parameter(name).detach()
        if name.endswith("c_attn.bias"):  # the keys' bias shifts all scores of a query alike: its gradient is noise
            three = [torch.cat([t.chunk(3)[i] for i in (0, 2)]) for t in three]
        rounding.assert_moved_alike(*three, epsilon, name)


def test_clipping_in_the_update_is_that_of_the_gradients_also_in_backward():
    def run(place, at_once=False, by_hand=False, **options):
        model, optimizer = wrap(small_gpt2(), place, update_in_backward=at_once, **options)
        if by_hand:
            for step in range(4):
                language_loss(model, step).backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 2e-4)
                optimizer.step()
                optimizer.zero_grad()
        else:
            train(model, optimizer, language_loss, steps=4)
        sluice.torch.close(model)
        return values_of(model)

    expected = run("memory", by_hand=True)
    assert not same_values(expected, run("memory"))
    assert same_values(expected, run("memory", clip_value=2e-4))
    assert same_values(expected, run("disk", clip_value=2e-4))
    assert same_values(expected, run("disk", clip_value=2e-4, at_once=True))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(sluice.InvalidArgumentError, match="clip_value is"):
        wrap(small_gpt2(), "memory", clip_value=bound)
