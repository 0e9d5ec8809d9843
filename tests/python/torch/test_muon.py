"""Muon for a wrapped model: its parameters, their learning rates, and what is refused."""

import pytest
import torch
from support.wrapped_models import language_loss, small_gpt2, train, values_of, wrap

import sluice
import sluice.torch

TABLES = {"transformer.wte.weight", "transformer.wpe.weight"}


def arrays_of(model):
    """The names of each parameter's arrays of state."""
    engine, found = sluice.torch.engine_of(model), {}
    for unit in engine.units:
        engine.get_state(unit.name, lambda p, array, first, values: found.setdefault(p, set()).add(array))
    return found


def is_muons(arrays):
    return arrays == {"momentum_buffer"}


def test_matrices_are_muons_but_for_tables_of_tokens():
    model, _ = wrap(small_gpt2(), "memory", sluice.Muon())
    shapes = {name: p.dim() for name, p in model.named_parameters()}
    assert {name: is_muons(arrays) for name, arrays in arrays_of(model).items()} == {
        name: dim == 2 and name not in TABLES for name, dim in shapes.items()
    }


def test_the_output_head_is_known_where_the_model_says_so():
    class Model(torch.nn.Module):
        def __init__(self, says):
            super().__init__()
            self.middle, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 30)
            if says:
                self.get_output_embeddings = lambda: self.head

    for says in (True, False):
        model, _ = wrap(Model(says), "memory", sluice.Muon())
        found = arrays_of(model)
        assert is_muons(found["middle.weight"]) and is_muons(found["head.weight"]) == (not says)


def test_a_group_says_otherwise():
    groups = [
        {"params": ["transformer.wpe.weight"], "use_muon": True},
        {"params": ["transformer.h.0.attn.c_attn.weight"], "use_muon": False, "lr": 1e-5},
    ]
    model, optimizer = wrap(small_gpt2(), "disk", sluice.Muon(), param_groups=groups)
    found = arrays_of(model)
    assert is_muons(found["transformer.wpe.weight"])
    assert not is_muons(found["transformer.h.0.attn.c_attn.weight"])
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-5, 1e-3]
    before = values_of(model)
    train(model, optimizer, language_loss, steps=1)
    moved = {name: (value - before[name]).abs().max() for name, value in values_of(model).items()}
    assert 0 < moved["transformer.h.0.attn.c_attn.weight"] < 1.1e-5


def test_adamw_has_a_learning_rate_of_its_own_in_groups_that_state_none():
    no_decay = [f"transformer.h.{i}.ln_1.weight" for i in range(3)] + ["transformer.h.0.mlp.c_fc.weight"]
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": ["transformer.h.1.ln_2.weight"], "lr": 5e-5}]
    model, optimizer = wrap(small_gpt2(), "memory", sluice.Muon(lr=0.02, adamw_lr=3e-4), param_groups=groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.02, 0.0),
        (5e-5, 0.1),
        (0.02, 0.1),
        (3e-4, 0.0),
        (3e-4, 0.1),
    ]
    members = [{names[id(p)] for p in g["params"]} for g in optimizer.param_groups]
    assert members[0] == {"transformer.h.0.mlp.c_fc.weight"} and members[1] == {"transformer.h.1.ln_2.weight"}
    assert all(".c_" in name and name.endswith("weight") for name in members[2])
    assert members[3] == set(no_decay[:3]) and members[4] >= TABLES
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 2.5e-5, 0.01, 1.5e-4, 1.5e-4]
    train(model, optimizer, language_loss, steps=1)
    scheduler.step()


def test_settings_that_cannot_be():
    model = small_gpt2()
    groups = [{"params": ["transformer.ln_f.weight"], "use_muon": True}]
    with pytest.raises(sluice.InvalidArgumentError, match=r"\(128,\).*use_muon, which is for matrices"):
        wrap(model, "memory", sluice.Muon(), param_groups=groups)
    with pytest.raises(sluice.InvalidArgumentError, match=r"use_muon, and the optimizer is AdamW.*sluice.Muon\(\)"):
        wrap(model, "memory", sluice.AdamW(), param_groups=groups)
    units = [sluice.Unit("u", [sluice.Parameter("p", (4, 4))])]
    with pytest.raises(sluice.InvalidArgumentError, match=r"adamw_lr is for sluice.torch.wrap\(\)"):
        sluice.plan(units, sluice.Options(memory="4GiB", optimizer=sluice.Muon(adamw_lr=1e-4)))


def test_a_pytorch_without_products_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sluice.torch._prepare, "_LIBRARY", tmp_path / "libtorch_cpu.so")
    assert sluice.torch.team() is None
    with pytest.raises(sluice.NotFoundError, match="sgemm_.*another optimizer"):
        wrap(small_gpt2(), "memory", sluice.Muon())
