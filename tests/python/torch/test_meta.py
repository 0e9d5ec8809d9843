"""Models that were built on the meta device: first values, and errors for what has none."""

import warnings

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.wrapped_models import language_loss, on_meta, readable, same_values, small_gpt2, train, units_of_modules, values_of, wrap

import sluice
import sluice.torch


def test_a_model_on_the_meta_device_gets_its_first_values():
    model = on_meta(lambda: transformers.GPT2LMHeadModel(small_gpt2().config))
    torch.manual_seed(3)
    model, optimizer = wrap(model, "disk")
    assert model.lm_head.weight is model.transformer.wte.weight
    values = values_of(model)
    assert 0.01 < values["transformer.h.0.mlp.c_fc.weight"].std() < 0.03
    assert torch.equal(values["transformer.ln_f.weight"], torch.ones(128))
    losses = train(model, optimizer, language_loss, steps=6).values
    assert losses[0] == pytest.approx(6.24, abs=0.2)


def test_modules_without_a_way_to_begin_are_named():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(3))

    model = on_meta(lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), Scale()))
    with pytest.raises(sluice.InvalidArgumentError, match=r"'1' \(Scale\).*reset_parameters"):
        wrap(model, "memory")


# ---- by the model's own rules ----


def all_of_torch():
    return torch.nn.Sequential(
        torch.nn.Embedding(7, 24), torch.nn.Linear(24, 24), torch.nn.MultiheadAttention(24, 2), torch.nn.LSTM(24, 24),
        torch.nn.BatchNorm1d(24), torch.nn.Conv1d(24, 24, 3), torch.nn.GroupNorm(2, 24), torch.nn.Bilinear(24, 24, 24),
    )  # fmt: skip


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_modules_of_torch_begin_with_the_bits_that_they_have_elsewhere(place):
    torch.manual_seed(5)
    plain = all_of_torch()
    model = on_meta(all_of_torch)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(model, place, units=units_of_modules(model))
    assert same_values(values_of(model), values_of(plain))
    assert same_values(dict(model.named_buffers()), dict(plain.named_buffers()))


class Nano(torch.nn.Module):
    """A model whose constructor sets its first values."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)])
        self.apply(self.begin)

    def begin(self, module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=5.0)
            torch.nn.init.zeros_(module.bias)


class Ruled(Nano):
    def _init_weights(self, module):
        self.begin(module)


def test_a_rule_of_the_models_own_counts():
    model = on_meta(lambda: torch.nn.Sequential(Ruled(), torch.nn.Linear(64, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(model, "disk")
    values = values_of(model)
    assert 4 < values["0.inner.0.weight"].std() < 6 and not values["0.inner.0.bias"].any()
    assert torch.equal(values["0.inner.1.weight"], torch.ones(64)) and values["1.weight"].std() < 1


def test_what_only_a_constructor_does_is_warned_of():
    model = on_meta(lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), Nano()))
    with pytest.warns(UserWarning, match=r"Nano \('1'\).*reset_parameters\(\).*constructor.*_init_weights") as warned:
        wrap(model, "memory")
    assert len(warned) == 1
    assert values_of(model)["1.inner.0.weight"].std() < 1


class Parent(torch.nn.Module):
    """A model whose rule sets values of modules inside it, too."""

    def __init__(self, *inside):
        super().__init__()
        self.inside = torch.nn.ModuleList(inside)

    def reset_parameters(self):
        for p in self.parameters():
            torch.nn.init.constant_(p, 7.0)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_what_has_values_keeps_them(place, tmp_path):
    """One unit has a layer with values, one on the meta device, and one whose weight is in a file."""
    there = torch.nn.Linear(8, 8)
    expected = values_of(there)
    model = Parent(there, on_meta(lambda: torch.nn.Linear(8, 8)))
    wrap(model, place)
    assert same_values(values_of(there), expected)
    assert all(bool((p == 7).all()) for p in values_of(model.inside[1]).values())

    save_file({"inside.0.weight": torch.full((8, 8), 3.0)}, tmp_path / "a.safetensors")
    model = on_meta(lambda: Parent(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    wrap(model, place, weights=tmp_path)
    values = values_of(model)
    assert [p.flatten()[0].item() for p in values.values()] == [3, 7, 7, 7]
    assert bool((values["inside.0.weight"] == 3).all())


class Marked(torch.nn.Parameter):
    """A subclass of Parameter."""


def test_what_the_user_gave_a_parameter_stays():
    model = on_meta(lambda: torch.nn.Linear(8, 8))
    model.weight = Marked(model.weight)
    model.weight.mark, calls = 3, []
    kept = model.weight.register_hook(lambda gradient: gradient * 2)
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    model, optimizer = wrap(model, "disk")
    with readable(model):
        assert type(model.weight) is Marked
    assert isinstance(model.weight, Marked) and model.weight.mark == 3
    for factor in (2, 1):
        model(torch.ones(1, 8)).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((8, 8), float(factor)))
        optimizer.zero_grad()
        kept.remove()
    assert [p is model.weight for p in calls] == [True, True]


def test_buffers_come_from_files_too(tmp_path):
    def make():
        inner = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.BatchNorm1d(24), Buffered(**BUFFERS_IN_FILES))
        return torch.nn.ModuleDict({"inner": inner})

    plain = make()
    plain.inner[:2](torch.randn(9, 24))
    save_file(plain.inner.state_dict(), tmp_path / "a.safetensors")
    model = on_meta(make)
    wrap(model, "disk", weights=tmp_path)
    assert same_values(model.state_dict(), plain.state_dict()) and model.inner[1].running_mean.any()
    save_file({"1.running_mean": torch.zeros(24, dtype=torch.int64)}, tmp_path / "a.safetensors")
    with pytest.raises(sluice.InvalidArgumentError, match="'inner.1.running_mean' is of torch.int64.*torch.float32"):
        wrap(on_meta(make), "disk", weights=tmp_path)


# ---- what no rule gives a value ----


class Buffered(torch.nn.Module):
    """A module with buffers beside a parameter, and a rule for those in `ruled`."""

    def __init__(self, ruled=(), **made):
        super().__init__()
        self.weight, self.made, self.ruled = torch.nn.Parameter(torch.ones(8)), made, ruled
        for name, make in made.items():
            self.register_buffer(name, make())

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)
        for name in self.ruled:
            self.get_buffer(name).copy_(self.made[name]())


BUFFERS = {
    "pos": lambda: torch.arange(8), "mask": lambda: torch.ones(8, 8, dtype=torch.bool).tril(),
    "turns": lambda: torch.ones(3, dtype=torch.complex64), "scale": lambda: torch.ones(3),
}  # fmt: skip
BUFFERS_IN_FILES = {name: BUFFERS[name] for name in ("pos", "mask", "scale")}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_without_values_are_named(name):
    one = {name: BUFFERS[name]}
    model = on_meta(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), Buffered(**one)))
    with pytest.raises(sluice.InvalidArgumentError, match=rf"buffer '1.{name}' was on the meta.*device='cpu'"):
        wrap(model, "memory")
    assert model[1].get_buffer(name).is_meta
    model = on_meta(lambda: Buffered(**one, ruled=[name]))
    wrap(model, "memory")
    assert torch.equal(model.get_buffer(name), BUFFERS[name]())
    model = on_meta(Buffered)
    model.register_buffer(name, BUFFERS[name]())
    wrap(model, "memory")
    assert torch.equal(model.get_buffer(name), BUFFERS[name]())


def test_parameters_without_values_are_named():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.factor = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))

        def reset_parameters(self):
            torch.nn.init.ones_(self.weight)
            self.factor.data[1:] = 3

    model = on_meta(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), Half()))
    with pytest.raises(sluice.InvalidArgumentError, match=r"'1.factor' was on the meta device.*all of it a value"):
        wrap(model, "memory")
    assert model[1].weight.is_meta
