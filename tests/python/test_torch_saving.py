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
from sluice.torch._memory import resident_bytes


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


def run_on(model, optimizer):
    return train(model, optimizer, language_loss, steps=3).values, values_of(model)


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("options", [{}, {"state": "bf16"}, {"optimizer": sluice.Lion(lr=1e-4)}, {"bf16": True}])
def test_a_run_goes_on_from_both_state_dicts_with_the_same_bits(place, options, tmp_path):
    def made(seed):
        kind = torch.bfloat16 if options.get("bf16") else torch.float32
        return wrap(small_gpt2(seed).to(kind), place, **{k: v for k, v in options.items() if k != "bf16"})

    model, optimizer = made(1)
    train(model, optimizer, language_loss, steps=3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    losses, values = run_on(model, optimizer)
    other, its_optimizer = made(9)
    state = torch.load(tmp_path / "state.pt")
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    its_losses, its_values = run_on(other, its_optimizer)
    assert its_losses == losses and same_values(its_values, values)


def test_state_goes_to_plain_pytorch_and_back(trained):
    model, optimizer = trained
    plain = small_gpt2(seed=9)
    plain.load_state_dict(model.state_dict())
    its_optimizer = torch.optim.AdamW(plain.parameters())
    its_optimizer.load_state_dict(optimizer.state_dict())
    losses = train(model, optimizer, language_loss, steps=3)
    assert train(plain, its_optimizer, language_loss, steps=3).close_to(losses)

    other, back = wrap(small_gpt2(seed=8), "disk")
    other.load_state_dict(plain.state_dict())
    back.load_state_dict(its_optimizer.state_dict())
    losses = train(plain, its_optimizer, language_loss, steps=3)
    assert train(other, back, language_loss, steps=3).close_to(losses)


def test_a_parameter_that_was_never_updated_has_no_state():
    model, optimizer = wrap(small_gpt2(), "memory")
    model.lm_head.weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert list(state) == [0] and state[0]["step"] == 1
    other, its_optimizer = wrap(small_gpt2(), "disk")
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert list(its_optimizer.state_dict()["state"]) == [0]


def test_state_of_another_kind_is_refused_and_nothing_is_changed(trained):
    model, optimizer = trained
    before = optimizer.state_dict()

    def refused(match, change):
        state = optimizer.state_dict()
        change(state)
        with pytest.raises(sluice.InvalidArgumentError, match=match):
            optimizer.load_state_dict(state)

    refused("keeps exp_avg, exp_avg_sq.*same optimizer", lambda s: s["state"][3].pop("exp_avg_sq"))
    refused("max_exp_avg_sq", lambda s: s["state"][3].update(max_exp_avg_sq=torch.zeros(1)))
    refused("has the shape", lambda s: s["state"][3].update(exp_avg=torch.zeros(1)))
    refused("of parameter 1000", lambda s: s["state"].update({1000: {}}))
    refused("betas", lambda s: s["param_groups"][0].update(betas=(0.5, 0.6), lr=7.0))
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, arrays in before["state"].items():
        assert all(torch.equal(after["state"][index][name], value) for name, value in arrays.items())


def test_state_larger_than_memory_lies_on_disk():
    model, optimizer = wrap(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))), "disk")
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    sluice.torch.engine_of(model).settle()
    before = resident_bytes()
    state = optimizer.state_dict()["state"]
    assert resident_bytes() - before < 64 << 20  # of 192 MiB
    assert state[46]["exp_avg"].any()


def test_state_without_room_is_refused():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))  # with its state 384 MiB
    model, optimizer = wrap(model, None, memory=resident_bytes() + (560 << 20), disk=None, reserve="64MiB")
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    with pytest.raises(sluice.BudgetError, match=r"state_dict takes 192 MiB more.*save\(folder\)"):
        optimizer.state_dict()


def test_settings_are_loaded():
    _, optimizer = wrap(small_gpt2(), "memory")
    settings = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(settings)
    assert optimizer.param_groups[0]["lr"] == 1e-3
