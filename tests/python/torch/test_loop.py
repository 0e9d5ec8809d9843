"""A wrapped model in the user's own loop: the bits of everything in memory, and the losses of plain PyTorch."""

import pytest
import torch
from support import fake_gpu, rounding
from support.wrapped_models import language_loss, plain_optimizer, readable, same_values, small_gpt2, tokens, train, values_of, wrap

import sluice
import sluice.torch

OF_LOSSES = rounding.of_losses(rounding.of_model(small_gpt2()))


def test_a_scheduler_that_cycles_the_momentum():
    """One that cycles betas is in test_groups.py."""

    def run(place):
        model, settings = small_gpt2(), sluice.SGD(momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9) if place is None else wrap(model, place, settings)[1]
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 3e-3, step_size_up=2)
        return train(model, optimizer, language_loss, steps=5, scheduler=scheduler), values_of(model)

    (memory, values), (disk, values_on_disk) = run("memory"), run("disk")
    assert memory.values == disk.values and same_values(values, values_on_disk)
    assert memory.close_to(run(None)[0])


def test_an_average_of_weights_that_was_made_before():
    model = small_gpt2()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75))
    _, optimizer = wrap(model, "disk")
    expected = {}
    for _ in range(3):
        train(model, optimizer, language_loss, steps=1)
        with readable(model):
            average.update_parameters(model)
        expected = {name: torch.lerp(expected.get(name, value), value, 0.25) for name, value in values_of(model).items()}
    assert same_values(values_of(average.module), expected)


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_parameter_groups_whose_settings_change(update_in_backward):
    def run(place):
        model = small_gpt2()
        no_decay = [p for name, p in model.named_parameters() if p.dim() < 2]
        group = {"params": no_decay, "lr": 2e-3, "weight_decay": 0.0, "betas": [0.8, 0.95]}
        if place is None:
            rest = [p for p in model.parameters() if p.dim() >= 2]
            optimizer = torch.optim.AdamW([group, {"params": rest}], lr=1e-3)
        else:
            optimizer = wrap(model, place, param_groups=[group], update_in_backward=update_in_backward)[1]
        losses = train(model, optimizer, language_loss, steps=2).values
        optimizer.param_groups[1]["lr"] = torch.tensor(5e-4)
        optimizer.param_groups[0]["weight_decay"] = 0.3
        optimizer.param_groups[1]["betas"] = (0.7, 0.9)
        optimizer.param_groups[0]["eps"] = 1e-3
        return losses + train(model, optimizer, language_loss, steps=3).values

    plain, memory, disk = run(None), run("memory"), run("disk")
    assert memory == disk
    assert rounding.near(memory, plain, OF_LOSSES)


def test_momentum_of_muon_and_of_adafactor_in_mid_run():
    def run(place, settings, **changed):
        model, optimizer = wrap(small_gpt2(), place, settings)
        losses = train(model, optimizer, language_loss, steps=1).values
        optimizer.param_groups[0].update(changed)
        return losses + train(model, optimizer, language_loss, steps=2).values

    for settings, changed in (
        (sluice.Muon(), {"momentum": 0.5}),
        (sluice.Muon(), {"adamw_betas": (0.3, 0.5)}),
        (sluice.Adafactor(beta1=0.9), {"beta1": 0.5}),
        (sluice.Lion(), {"betas": (0.5, 0.7)}),
    ):
        as_it_was, memory = run("memory", settings), run("memory", settings, **changed)
        assert memory == run("disk", settings, **changed)
        assert memory[:2] == as_it_was[:2] and memory[2:] != as_it_was[2:]


def test_without_an_optimizer_for_evaluation_and_generation(tmp_path):
    plain = small_gpt2().eval()
    given = fake_gpu.placed(memory="6GiB", disk=tmp_path, place={"parameters": "disk"}, reserve="256MiB")
    wrapped, optimizer = sluice.torch.wrap(small_gpt2(), **given)
    assert optimizer is None
    wrapped.eval()
    with torch.no_grad():
        assert torch.equal(plain(tokens(0)).logits, wrapped(tokens(0)).logits)
        start = tokens(1)[:, :16]
        given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(plain.generate(start, **given), wrapped.generate(start, **given))


def test_gradient_scaler():
    def run(place):
        model = small_gpt2()
        optimizer = plain_optimizer(model) if place is None else wrap(model, place)[1]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        seen = []
        for step in range(12):
            loss = language_loss(model, step)
            scaler.scale(loss * (1e30 if step == 5 else 1.0)).backward()  # overflows once
            scaler.unscale_(optimizer)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() if step != 5 else 0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.item(), scaler.get_scale()]
        return seen

    plain, memory, disk = run(None), run("memory"), run("disk")
    assert memory == disk
    assert rounding.near(memory, plain, OF_LOSSES)
    assert any(b < a for a, b in zip(memory[2::3], memory[5::3], strict=False)), "no step was skipped"


def test_a_closure():
    def run(place):
        model = small_gpt2()
        optimizer = plain_optimizer(model) if place is None else wrap(model, place)[1]
        seen = []

        def closure():
            optimizer.zero_grad()
            loss = language_loss(model, len(seen))
            loss.backward()
            return loss

        for _ in range(3):
            seen.append(optimizer.step(closure).item())
        return seen

    assert rounding.near(run("memory"), run(None), OF_LOSSES)


def test_the_whole_is_within_its_budget():
    model, optimizer = wrap(small_gpt2(), None, memory="3GiB", disk=None)
    train(model, optimizer, language_loss, steps=2)
    ledger = {(line.tier, line.purpose): line for line in sluice.torch.engine_of(model).ledger()}
    assert 0 < ledger["host", "total"].peak <= 3 << 30
    assert sluice.torch.engine_of(model).counters().touches == 0, "a hook has missed a parameter"
