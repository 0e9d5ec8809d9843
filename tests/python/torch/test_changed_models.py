"""Models to which something was done after wrap() that it does not allow, and folders that are gone: what the errors say."""

import os

import peft
import pytest
from support import fake_gpu
from support.chain import Chain, still_trains
from support.wrapped_models import language_loss, small_gpt2, train, values_of, wrap

import sluice
import sluice.torch


def test_a_resized_embedding_needs_another_wrap():
    model, optimizer = wrap(small_gpt2(), "memory")
    before = values_of(model)
    with pytest.raises(sluice.StateError, match=r"resize_token_embeddings\(\).*close\(\) the model, call resize_token_embeddings\(\), and wrap"):
        model.resize_token_embeddings(600)
    assert values_of(model).keys() == before.keys()
    train(model, optimizer, language_loss, steps=1)
    sluice.torch.close(model)
    model.resize_token_embeddings(600)
    model, optimizer = wrap(model, "memory")
    train(model, optimizer, language_loss, steps=1)


@fake_gpu.cpu_alone("an operation on a parameter outside of a call is a StateError there")
def test_an_adapter_that_came_after_wrap():
    model, optimizer = wrap(small_gpt2(), "memory")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    language_loss(adapted, 0).backward()
    with pytest.raises(sluice.StateError, match=r"no parameter .* has a gradient. '.*lora_.*' has one, and came .*after.*6 such.*wrap it again"):
        optimizer.step()


def test_a_folder_that_is_gone_is_named(tmp_path):
    model, optimizer = wrap(Chain(), "disk", disk=tmp_path)
    assert still_trains(model, optimizer)
    moved = tmp_path.with_name("moved")
    os.rename(tmp_path, moved)
    with pytest.raises(sluice.SystemIOError, match=r"state_dict.*disk folder '.*': No such file.*save\(folder\)"):
        optimizer.state_dict()
    os.rename(moved, tmp_path)
    assert optimizer.state_dict()["state"][0]["exp_avg"].any()


def test_a_full_folder_is_named(tmp_path, monkeypatch):
    model, optimizer = wrap(Chain(), "disk", disk=tmp_path)
    assert still_trains(model, optimizer)

    def full(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(sluice.SystemIOError, match="No space left on device"):
            optimizer.state_dict()
    assert optimizer.state_dict()["state"] and still_trains(model, optimizer)
