"""Calls on the engine of a wrapped model: which are allowed, and which are refused with who makes them instead."""

import os

import numpy as np
import pytest
import torch
from support.chain import Chain, loss_of
from support.wrapped_models import units_of_modules, update, values_of, wrap

import sluice
import sluice.torch


REFUSED = [
    (lambda engine: engine.begin_step(), "a forward pass with gradients begins a step"),
    (lambda engine: engine.step(clip=1.0), r"step\(\) of the optimizer that sluice.torch.wrap\(\) gave"),
    (lambda engine: engine.abandon_step(), r"optimizer.zero_grad\(\)"),
    (lambda engine: engine.acquire(engine.units[0].name, gradient=True), "whenever a parameter is touched"),
    (lambda engine: engine.add_gradient("first.bias", torch.ones(24)), "add to p.grad"),
    (lambda engine: engine.multiply_gradient("first.bias", 2.0), r"p.grad.mul_\(factor\)"),
    (lambda engine: engine.drop_gradient("first.bias"), "set p.grad .* to None"),
]


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}])
def test_what_hooks_and_optimizer_do_is_refused_and_the_model_goes_on(options):
    def losses(refused):
        torch.manual_seed(0)
        model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()), held_units=2, **options)
        seen = []
        for step in range(3):
            loss = loss_of(model, step)
            refused(model)
            loss.backward()
            refused(model)
            optimizer.step()
            optimizer.zero_grad()
            refused(model)
            seen.append(loss.item())
        sluice.torch.close(model)
        return seen

    def refused(model):
        for call, remedy in REFUSED:
            with pytest.raises(sluice.StateError, match=f"engine of a wrapped model.*{remedy}"):
                call(sluice.torch.engine_of(model))

    assert losses(refused) == losses(lambda model: None)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_values_that_are_set_by_hand_are_the_models(place):
    model, optimizer = wrap(Chain(), place, units=units_of_modules(Chain()), held_units=2)
    update(optimizer, loss_of(model, 0))
    before = values_of(model)
    old = loss_of(model, 1)
    engine = sluice.torch.engine_of(model)
    for unit in engine.units:
        values = {name: np.asarray(view) for name, view in engine.get_values(unit.name).items()}
        engine.set_values(unit.name, {name: 2 * value for name, value in values.items()})
    assert all(torch.equal(value, 2 * before[name]) for name, value in values_of(model).items())
    with pytest.raises(RuntimeError, match="before .* was changed.*run forward again"):
        old.backward()
    loss_of(model, 2).backward()
    optimizer.step()


def test_a_function_is_an_address():
    for name in ("team", "sgemm"):
        with pytest.raises(sluice.InvalidArgumentError, match=rf"{name} is 'x'; the address .*sluice.torch.{name}\(\)"):
            sluice.plan([sluice.Unit("u", [sluice.Parameter("p", (3,))])], sluice.Options(memory="4GiB", **{name: "x"}))


def test_a_folder_that_is_missing_is_said_to_be(tmp_path):
    for folder, what in ((tmp_path / "none", "does not exist"), (tmp_path, "has no config.json")):
        with pytest.raises(sluice.NotFoundError, match=rf"the folder '.*' {what}.*save_pretrained\(\)"):
            sluice.torch.from_pretrained(folder, sluice.AdamW(), memory="4GiB")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(sluice.InvalidArgumentError, match="config.json' is not a file"):
        sluice.torch.from_pretrained(tmp_path, memory="4GiB")
