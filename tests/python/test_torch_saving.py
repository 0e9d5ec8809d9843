"""What of a wrapped model is saved, and loaded again."""

import pytest
import torch
import transformers
from wrapped_models import (
    language_loss,
    same_values,
    small_gpt2,
    tokens,
    train,
    values_of,
    wrap,
)

import sluice
import sluice.torch


@pytest.fixture
def trained():
    model, optimizer = wrap(small_gpt2(), "disk")
    train(model, optimizer, language_loss, steps=3)
    return model, optimizer


def test_a_state_dict_is_saved_and_loaded_by_plain_pytorch(trained, tmp_path):
    model, _ = trained
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain = small_gpt2(seed=9)
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same_values(values_of(plain), values_of(model))
    assert torch.equal(plain(tokens(0)).logits, model(tokens(0)).logits)


def test_save_pretrained(trained, tmp_path):
    model, _ = trained
    model.save_pretrained(tmp_path)
    assert same_values(values_of(transformers.GPT2LMHeadModel.from_pretrained(tmp_path)), values_of(model))


def test_a_checkpoint_of_the_engine_goes_on_with_the_same_bits(trained, tmp_path):
    model, optimizer = trained
    engine = sluice.torch.engine_of(model)
    engine.save(tmp_path)
    expected = train(model, optimizer, language_loss, steps=3).values, values_of(model)
    other, its_optimizer = wrap(small_gpt2(seed=9), "memory")
    sluice.torch.engine_of(other).load(tmp_path)
    assert (train(other, its_optimizer, language_loss, steps=3).values, values_of(other))[0] == expected[0]
    assert same_values(values_of(other), expected[1])


def test_the_optimizers_state_is_never_left_out_silently(trained):
    model, optimizer = trained
    with pytest.raises(sluice.StateError, match="engine_of"):
        optimizer.state_dict()
    plain = small_gpt2()
    other = torch.optim.AdamW(plain.parameters())
    language_loss(plain, 0).backward()
    other.step()
    with pytest.raises(sluice.StateError, match="load"):
        optimizer.load_state_dict(other.state_dict())


def test_settings_are_loaded():
    _, optimizer = wrap(small_gpt2(), "memory")
    settings = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(settings)
    assert optimizer.param_groups[0]["lr"] == 1e-3
