"""What wrap() and plan() refuse says what to do, and leaves the model as it was; so does what they find out about it."""

import copy

import pytest
import torch
from test_torch_autograd import Chain
from wrapped_models import same_values, units_of_modules, values_of, wrap

import sluice
import sluice.torch


def failing_at(monkeypatch, unit, also=()):
    """The engine takes no values of that unit, and gives none of those in `also`."""
    taking, giving = sluice.Engine.set_values, sluice.Engine.get_values

    def set_values(engine, name, values):
        if name == unit:
            raise sluice.SystemIOError("the disk is gone")
        return taking(engine, name, values)

    def get_values(engine, name, into=None):
        if name in also:
            raise sluice.SystemIOError("the disk is gone")
        return giving(engine, name, into)

    monkeypatch.setattr(sluice.Engine, "set_values", set_values)
    monkeypatch.setattr(sluice.Engine, "get_values", get_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_wrap_that_fails_midway_gives_the_values_back(dtype, place, monkeypatch):
    model = Chain().to(dtype)
    own, values = dict(model.named_parameters()), values_of(model)
    with monkeypatch.context() as fault:
        failing_at(fault, "last")
        with pytest.raises(sluice.SystemIOError, match="the disk is gone"):
            wrap(model, place, units=units_of_modules(model))
    assert all(p is own[name] for name, p in model.named_parameters())
    assert same_values(values_of(model), values)
    copy.deepcopy(model).half()
    wrap(model, place)
    assert same_values(values_of(model), values)


def test_a_wrap_whose_engine_fails_names_what_is_lost(monkeypatch):
    model = Chain()
    values = values_of(model)
    with monkeypatch.context() as fault:
        failing_at(fault, "last", also=["middle"])
        with pytest.raises(sluice.StateError, match=r"the disk is gone.*'middle.weight', 'middle.bias'; they are on"):
            wrap(model, "disk", units=units_of_modules(model))
    assert [name for name, p in model.named_parameters() if p.is_meta] == ["middle.weight", "middle.bias"]
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters() if not p.is_meta)


class Rooted(torch.nn.Module):
    """Has a buffer that no rule gives a value."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(24))
        self.register_buffer("scale", torch.ones(24))

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)


def test_a_model_on_the_meta_device_that_was_refused_is_as_it_was():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(24, 24), Rooted())
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for _ in range(2):
        with pytest.raises(sluice.InvalidArgumentError, match="'1.scale' was on the meta device"):
            wrap(model, "disk")
        now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert all(t is own[name] and t.is_meta for name, t in now.items())
        with pytest.raises(sluice.StateError, match="not wrapped"):
            sluice.torch.engine_of(model)
    copy.deepcopy(model).half()
