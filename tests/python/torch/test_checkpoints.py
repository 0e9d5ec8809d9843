"""Checkpoints of a wrapped model's engine: all that the model needs to go on with the same bits, buffers and groups included."""


import pytest
import torch
from support.chain import drawn
from support.wrapped_models import readable, same_values, train, values_of, wrap
from torch import nn

import sluice
import sluice.torch


def model_with_buffers(seed=1):
    """Batch norm's statistics, the vectors of both spectral norms, and a buffer that is not saved."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(24, 16), nn.BatchNorm1d(16), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh(),
        nn.utils.spectral_norm(nn.Linear(16, 2)),
    )  # fmt: skip
    model.register_buffer("scale", torch.ones((), dtype=torch.float64))
    model.register_buffer("unsaved", torch.ones(3), persistent=False)
    model(drawn(0))  # makes what hooks keep
    return model


def groups_of(model, lr=1e-2):
    matrices, vectors = ([n for n, p in model.named_parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    return [{"params": matrices, "lr": lr, "lr_scale": 0.5}, {"params": vectors, "weight_decay": 0.0}]


def loss_of(model, step):
    return model(drawn(step)).square().mean()


def buffers_of(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def started(place, seed=1, lr=1e-2):
    model = model_with_buffers(seed)
    with readable(model):
        groups = groups_of(model, lr)
    model, optimizer = wrap(model, place, param_groups=groups)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_run_goes_on_with_the_same_bits(place, tmp_path):
    model, optimizer, scheduler = started(place)
    train(model, optimizer, loss_of, steps=3, scheduler=scheduler)
    model.scale.fill_(3.0)
    folder = sluice.torch.engine_of(model).save(tmp_path)
    saved, settings = buffers_of(model), [{**group, "params": None} for group in optimizer.param_groups]
    losses = train(model, optimizer, loss_of, steps=3, scheduler=scheduler).values

    for path in (folder, tmp_path):
        other, its_optimizer, its_scheduler = started("memory", seed=2, lr=0.3)
        sluice.torch.engine_of(other).load(path)
        its_scheduler.load_state_dict({**its_scheduler.state_dict(), "last_epoch": 3, "_step_count": 4})
        found = buffers_of(other)
        assert all(torch.equal(found[name], saved[name]) for name in saved if name != "unsaved")
        assert [{**group, "params": None} for group in its_optimizer.param_groups] == settings
        assert train(other, its_optimizer, loss_of, steps=3, scheduler=its_scheduler).values == losses
        assert same_values(values_of(other), values_of(model)) and same_values(buffers_of(other), buffers_of(model))


def test_a_checkpoint_of_an_engine_alone_says_what_it_has_not(tmp_path):
    model, optimizer, _ = started("memory")
    engine = sluice.torch.engine_of(model)
    sluice.Engine.save(engine, tmp_path)
    before = buffers_of(model)
    with pytest.warns(UserWarning, match="not saved by a wrapped model.*neither buffers nor the settings"):
        engine.load(tmp_path)
    assert same_values(buffers_of(model), before)
    train(model, optimizer, loss_of, steps=1)


def refused(folder, error, match, model):
    values, buffers = values_of(model), buffers_of(model)
    with pytest.raises(error, match=match):
        sluice.torch.engine_of(model).load(folder)
    assert same_values(values_of(model), values) and same_values(buffers_of(model), buffers)


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path):
    model, optimizer, _ = started("memory")
    train(model, optimizer, loss_of, steps=2)
    folder = sluice.torch.engine_of(model).save(tmp_path)

    def more(model):
        model.register_buffer("more", torch.ones(1))

    def narrow(model):
        model.scale = torch.ones((), dtype=torch.float32)

    for change, groups, match in (
        (more, groups_of, "the checkpoint has no buffer 'more'"),
        (narrow, groups_of, "the buffer 'scale' is torch.float64"),
        (lambda model: None, lambda model: None, r"groups of \[3, 5\] parameters.*of \[8\]"),
    ):
        other = model_with_buffers(seed=2)
        change(other)
        other, its_optimizer = wrap(other, "memory", param_groups=groups(other))
        refused(folder, sluice.InvalidArgumentError, match, other)

    other, its_optimizer, _ = started("memory", seed=2)
    for name in ("buffers.safetensors", "groups.json"):
        file = tmp_path / folder.split("/")[-1] / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused(folder, sluice.CorruptError, name, other)
        file.write_bytes(whole)
    sluice.torch.engine_of(other).load(folder)


def test_a_newest_checkpoint_that_is_not_whole_is_passed_over_and_named(tmp_path, capfd):
    model, optimizer, _ = started("memory")
    engine, folders, buffers = sluice.torch.engine_of(model), [], []
    for _ in range(2):
        train(model, optimizer, loss_of, steps=1)
        folders.append(engine.save(tmp_path))
        buffers.append(buffers_of(model))
    file = tmp_path / "step-00000002" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    capfd.readouterr()
    engine.load(tmp_path)
    told = capfd.readouterr().err
    assert told.count("warning") == 1 and f"'{folders[1]}' is not a whole checkpoint: '{folders[1]}/model.safetensors' has" in told
    assert f"; '{folders[0]}' is taken" in told
    assert engine.steps == 1 and same_values(buffers_of(model), buffers[0])
    refused(folders[1], sluice.CorruptError, f"model.safetensors.*move '{folders[1]}' away to go on from .*'{folders[0]}'", model)

    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(sluice.CorruptError, match=f"is damaged in the.*move '{folders[1]}' away to go on from .*'{folders[0]}'"):
        engine.load(tmp_path)
    file.write_bytes(whole)
    other, _, _ = started("memory")
    (tmp_path / folders[0] / "manifest.json").unlink()
    capfd.readouterr()
    sluice.torch.engine_of(other).load(tmp_path)  # an older one that is broken is no choice
    told = capfd.readouterr().err
    assert f"'{folders[0]}' is not a whole checkpoint" in told and "is taken" not in told
    (tmp_path / folders[1] / "manifest.json").unlink()
    refused(tmp_path, sluice.CorruptError, "holds no whole checkpoint to go on from", other)


def test_a_checkpoint_of_other_training_says_of_what(tmp_path):
    def wrapped(optimizer, layers=2, frozen=0):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
        for layer in model[:frozen]:
            layer.requires_grad_(False)
        return wrap(model, "memory", disk=[], optimizer=optimizer)[0]

    folder = sluice.torch.engine_of(wrapped(sluice.AdamW())).save(tmp_path / "adamw")
    build, remedy = "; build the model as it was when the checkpoint was saved", f"by load_values.. of '{folder}/model.safetensors'"
    for other, match in (
        (wrapped(sluice.SGD()), f"'{folder}' was saved in a training by the optimizer 'adamw', and this engine has 'sgd'; .*{remedy}"),
        (wrapped(sluice.AdamW(), layers=3), f"model.safetensors' is of another model than this one: it has no '2.weight'{build}"),
        (wrapped(sluice.AdamW(), layers=1), f"model.safetensors' is of another model than this one: it has '1.weight', too{build}"),
    ):
        refused(folder, sluice.InvalidArgumentError, match, other)
    sluice.torch.engine_of(other := wrapped(sluice.SGD())).load_values(f"{folder}/model.safetensors")
    refused(sluice.torch.engine_of(other).save(tmp_path / "sgd"), sluice.InvalidArgumentError,
            "holds of optimizer state nothing, and sgd needs optimizer.momentum_buffer", wrapped(sluice.SGD(momentum=0.9)))  # fmt: skip
    folder = sluice.torch.engine_of(wrapped(sluice.AdamW(), frozen=1)).save(tmp_path / "frozen")
    refused(folder, sluice.InvalidArgumentError, "has nothing of '0.weight', which is trained here; freeze what", wrapped(sluice.AdamW()))


class Keeping(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_what_a_checkpoint_cannot_have_is_said(tmp_path):
    model = nn.Sequential(Keeping(4, 4))
    model.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("wide", torch.zeros(1).expand(3))
    groups = [{"params": model.parameters(), "note": object()}]
    _, optimizer = wrap(model, "memory", param_groups=groups)
    with pytest.warns(UserWarning, match=r"the extra state of '0' \(Keeping.*the buffer 'turn'.*the buffer 'wide'.*'note' of parameter group 0"):
        sluice.torch.engine_of(model).save(tmp_path)
    optimizer.param_groups[0]["lr"] = 0.5
    sluice.torch.engine_of(model).load(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_files_of_the_callers_take_no_names_of_the_checkpoints_own(tmp_path):
    model, _ = wrap(nn.Linear(4, 4), "memory", disk=[])
    for name in ("buffers.safetensors", "groups.json"):
        with pytest.raises(sluice.InvalidArgumentError, match=f"'{name}' is a file of the checkpoint's own"):
            sluice.torch.engine_of(model).save(tmp_path, files={name: [b"x"]})
    assert not list(tmp_path.iterdir())
