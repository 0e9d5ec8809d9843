"""Models whose parameters are of several types: f32 norms or adapters beside bf16 weights."""

import peft
import pytest
import torch
from support.wrapped_models import (
    check_steps, language_loss, readable, same_values, small_gpt2, train, units_of_modules, values_of, wrap,
)  # fmt: skip

import sluice
import sluice.torch


class Block(torch.nn.Module):
    """A block of a model in bf16: the norm is in f32, the layer behind it in bf16."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 3 * width, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(3 * width, width, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x).bfloat16()))).float()


class OneModuleOfBoth(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width).bfloat16())
        self.scale = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x.bfloat16() @ self.weight).float() * self.scale


def mixed():
    torch.manual_seed(5)
    return torch.nn.Sequential(*(Block(48) for _ in range(3)), OneModuleOfBoth(48))


def square_loss(model, step):
    return model(torch.randn(8, 48, generator=torch.Generator().manual_seed(step))).square().mean()


def with_adapters():
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.0)
    model = peft.get_peft_model(small_gpt2().bfloat16(), config)  # makes adapters in f32
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    return model


@pytest.mark.parametrize("made, loss_of, rows, units", [
    (mixed, square_loss, 8, None), (mixed, square_loss, 8, units_of_modules(mixed())), (with_adapters, language_loss, 64, None),
], ids=["norms", "norms in units of modules", "adapters"])  # fmt: skip
def test_f32_beside_bf16_has_the_same_bits_at_any_place_and_steps_near_those_of_pytorch(made, loss_of, rows, units):
    def run(place):
        model, optimizer = wrap(made(), place, units=units)
        losses, values = train(model, optimizer, loss_of, steps=4).values, values_of(model)
        sluice.torch.close(model)
        return losses, values

    (losses, values), (on_disk, values_on_disk) = run("memory"), run("disk")
    assert losses == on_disk and same_values(values, values_on_disk)
    model, optimizer = wrap(made(), "memory", units=units)
    check_steps(model, optimizer, made(), loss_of, steps=4, rows=rows)
    assert same_values(values_of(model), values)


@pytest.mark.parametrize("options", [{}, {"master": "none", "seed": 7}, {"state": "8bit"}])
def test_a_checkpoint_and_a_state_dict_go_on_with_the_same_bits(tmp_path, options):
    def begin(place):
        return wrap(mixed(), place, **options)

    model, optimizer = begin("memory")
    train(model, optimizer, square_loss, steps=2)
    place = sluice.torch.engine_of(model).save(tmp_path / "run")
    with readable(model):
        weights = {name: t.clone() for name, t in model.state_dict().items()}
    state = optimizer.state_dict()
    expected = train(model, optimizer, square_loss, steps=3).values
    values = values_of(model)

    resumed, its_optimizer = begin("disk")
    sluice.torch.engine_of(resumed).load(place)
    assert train(resumed, its_optimizer, square_loss, steps=3).values == expected
    assert same_values(values_of(resumed), values)

    loaded, its_optimizer = begin("disk")
    with readable(loaded):
        loaded.load_state_dict(weights)
    its_optimizer.load_state_dict(state)
    if options.get("master") != "none":  # rounding depends on the engine's step, which a state_dict lacks
        assert train(loaded, its_optimizer, square_loss, steps=3).values == expected
        assert same_values(values_of(loaded), values)
