"""Parameter groups and state of a wrapped model's optimizer beside those of torch.optim, and of transformers."""

import pytest
import torch
from support.chain import Chain, loss_of
from support.wrapped_models import train, values_of, wrap
from torch import nn
from transformers.optimization import Adafactor

import sluice
import sluice.torch


class Matrices(Chain):
    """A model of matrices alone, which torch.optim.Muon asks for."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(24, 24, bias=False) for _ in range(3))


def made(kind=Chain, seed=1):
    torch.manual_seed(seed)
    return kind()


def adafactor(params):
    return Adafactor(params, lr=0.5, relative_step=False, scale_parameter=False)


OPTIMIZERS = {
    "adamw": (sluice.AdamW(lr=1e-2, weight_decay=0.1), torch.optim.AdamW),
    "adam": (sluice.Adam(lr=1e-2, weight_decay=0.1), torch.optim.Adam),
    "nesterov": (sluice.SGD(lr=1e-1, momentum=0.9, nesterov=True), torch.optim.SGD),
    "muon": (sluice.Muon(lr=1e-2), torch.optim.Muon),
    "adafactor with momentum": (sluice.Adafactor(lr=1e-2, beta1=0.9), adafactor),
    "adafactor by steps": (sluice.Adafactor(relative_step=True), adafactor),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_to_the_other_optimizer_and_back_with_a_step_each_way(name, monkeypatch):
    settings, other = OPTIMIZERS[name]
    kind = Matrices if name == "muon" else Chain
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # in which torch.optim.Muon iterates
    model, optimizer = wrap(made(kind), "memory", settings)
    train(model, optimizer, loss_of, steps=2)
    plain = made(kind, seed=8)
    plain.load_state_dict(model.state_dict())
    its_optimizer = other(plain.parameters())
    its_optimizer.load_state_dict(optimizer.state_dict())
    before = values_of(model)
    assert train(plain, its_optimizer, loss_of, steps=3).close_to(train(model, optimizer, loss_of, steps=3))
    assert all(not torch.equal(value, before[name]) for name, value in values_of(model).items())

    again, back = wrap(made(kind, seed=9), "disk", settings)
    again.load_state_dict(plain.state_dict())
    back.load_state_dict(its_optimizer.state_dict())
    assert train(again, back, loss_of, steps=3).close_to(train(plain, its_optimizer, loss_of, steps=3))
    assert back.state_dict()["param_groups"][0].keys() >= optimizer.state_dict()["param_groups"][0].keys()


def test_settings_that_another_optimizer_of_torch_has_are_refused():
    _, optimizer = wrap(made(), "memory", sluice.Adam())
    state = torch.optim.AdamW(made().parameters()).state_dict()
    with pytest.raises(sluice.InvalidArgumentError, match="decoupled_weight_decay is True.*to Adam it is always False.*loaded by that one"):
        optimizer.load_state_dict(state)
    _, optimizer = wrap(made(), "memory", sluice.SGD(momentum=0.9))
    state = torch.optim.SGD(made().parameters(), lr=0.1, momentum=0.9, dampening=0.5).state_dict()
    with pytest.raises(sluice.InvalidArgumentError, match="dampening is 0.5.*to SGD it is always 0"):
        optimizer.load_state_dict(state)


# ---- groups ----


def by_shape(model, **keys):
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    return [{"params": matrices, **keys}, {"params": vectors, "weight_decay": 0.0, **keys}]


def with_names(model):
    named = list(model.named_parameters())
    return [{"params": [pair for pair in named if pair[1].dim() > 1]}, {"params": [pair for pair in named if pair[1].dim() == 1], "lr": 0.1}]


GROUPS = {
    "all": by_shape,
    "keys of the user's own": lambda model: by_shape(model, lr_scale=0.5, initial_lr=0.1),
    "names": with_names,
    "one of pairs": lambda model: list(model.named_parameters()),
    "an empty one": lambda model: [{"params": []}, {"params": list(model.parameters())}],
    "backwards": lambda model: [{"params": [p]} for p in reversed(list(model.parameters()))],
}


@pytest.mark.parametrize("frozen", [(), ("first.weight", "last.bias")])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_those_that_torch_optim_makes_of_the_same(name, frozen):
    def with_frozen(seed):
        model = made(seed=seed)
        for one in frozen:
            model.get_parameter(one).requires_grad_(False)
        return model

    plain, model = with_frozen(1), with_frozen(1)
    its_optimizer = torch.optim.AdamW(GROUPS[name](plain), lr=1e-3)
    model, optimizer = wrap(model, "memory", sluice.AdamW(lr=1e-3), param_groups=GROUPS[name](model))
    where = {id(p): name for m in (plain, model) for name, p in m.named_parameters()}
    for ours, theirs in zip(optimizer.param_groups, its_optimizer.param_groups, strict=True):
        assert [where[id(p)] for p in ours["params"]] == [where[id(p)] for p in theirs["params"]]
        assert all(ours[key] == theirs[key] for key in theirs.keys() & (ours.keys() - {"params"}))
        assert theirs.keys() - ours.keys() <= {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"}
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2 * (g + 1) for g in range(len(o.param_groups))], total_steps=8)
        for o in (optimizer, its_optimizer)
    ]
    losses = train(plain, its_optimizer, loss_of, steps=2, scheduler=schedules[1])
    assert train(model, optimizer, loss_of, steps=2, scheduler=schedules[0]).close_to(losses)

    ours, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, arrays in theirs["state"].items():
        assert arrays["exp_avg"].shape == ours["state"][index]["exp_avg"].shape
    its_optimizer.load_state_dict(ours)
    optimizer.load_state_dict(theirs)
    losses = train(plain, its_optimizer, loss_of, steps=2)
    assert train(model, optimizer, loss_of, steps=2).close_to(losses)


def test_parameters_in_no_group_are_in_the_last_one_where_they_are_trained():
    model = made()
    given = [{"params": [model.last.bias], "lr": 0.5}]
    _, optimizer = wrap(model, "memory", param_groups=given)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(1, 0.5), (5, 1e-3)]


def test_state_of_what_is_frozen_now_is_left_out_and_that_is_said():
    plain = made()
    its_optimizer = torch.optim.AdamW(plain.parameters())
    train(plain, its_optimizer, loss_of, steps=2)
    model = made()
    model.first.requires_grad_(False)
    model, optimizer = wrap(model, "memory")
    with pytest.warns(UserWarning, match=r"state of 'first.weight', which was frozen.*left out \(2 parameters\)"):
        optimizer.load_state_dict(its_optimizer.state_dict())
    assert list(optimizer.state_dict()["state"]) == [2, 3, 4, 5]
