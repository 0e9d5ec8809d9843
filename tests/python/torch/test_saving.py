"""Saving and loading a wrapped model."""

import copy
import resource
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from support.processes import measures_the_process, run_big
from support.user_models import SHOWN
from support.wrapped_models import (
    language_loss, same_values, small_gpt2, tokens, train, units_of_modules, values_of, wrap,
)  # fmt: skip

import sluice
import sluice.torch
from sluice.torch._measures import resident_bytes


@pytest.fixture
def trained():
    model, optimizer = wrap(small_gpt2(), "disk")
    train(model, optimizer, language_loss, steps=2)
    return model, optimizer


def test_a_state_dict_is_saved_and_loaded_by_plain_pytorch(trained, tmp_path):
    model, _ = trained
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain = small_gpt2(seed=9)
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same_values(values_of(plain), values_of(model))
    assert torch.equal(plain(tokens(0)).logits, model(tokens(0)).logits)


def files_of(folder):
    return {file.name: load_file(file) for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])  # cases: tied weights, several names, joined tensors
def test_save_pretrained_writes_the_files_of_a_plain_model(name, tmp_path):
    torch.manual_seed(1)
    model = SHOWN[name].make()
    model.save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    wrap(model, "disk", units=units_of_modules(model))
    model.save_pretrained(tmp_path / "wrapped", max_shard_size="100KB")
    plain, wrapped = files_of(tmp_path / "plain"), files_of(tmp_path / "wrapped")
    assert plain.keys() == wrapped.keys() and len(plain) > 1
    assert all(same_values(plain[file], wrapped[file]) for file in plain)
    for file in ("config.json", "model.safetensors.index.json"):
        assert (tmp_path / "plain" / file).read_text() == (tmp_path / "wrapped" / file).read_text()
    assert same_values(values_of(type(model).from_pretrained(tmp_path / "wrapped")), values_of(model))
    sluice.torch.close(model)
    assert "save_pretrained" not in model.__dict__


@measures_the_process
def test_large_models_and_their_state_are_saved_and_loaded_within_the_budget(tmp_path):
    """The model has 188 MB of parameters, more than the buffer of a file could hide, and 376 MB of state. What torch.save() reads of
    state is cache of files, which goes back to the system in later steps."""
    finished = run_big(f"""
        import safetensors.torch
        os.chdir({str(tmp_path)!r})
        model, optimizer = wrapped(310 << 20)
        step()
        sums = {{name: p.double().sum().item() for name, p in model.named_parameters()}}
        sluice.torch.save_file(model.state_dict(), "a.safetensors")
        torch.save(model.state_dict(), "a.pt")
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert peak() < begin + (310 << 20), (peak() - begin) >> 20
        torch.save(state, "optimizer.pt")
        step()
        assert held() < begin + (310 << 20), (held() - begin) >> 20
        with safetensors.safe_open("a.safetensors", "pt") as file:
            assert {{name: file.get_tensor(name).double().sum().item() for name in file.keys()}} == sums
        assert {{name: p.double().sum().item() for name, p in torch.load("a.pt", mmap=True).items()}} == sums
        saved = torch.load("optimizer.pt", mmap=True)["state"]
        assert saved[46]["exp_avg"].any() and torch.equal(saved[46]["exp_avg"], state["state"][46]["exp_avg"])
        assert not torch.equal(saved[46]["exp_avg"], optimizer.state_dict()["state"][46]["exp_avg"])
        print("done")
    """)
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr


def test_tied_tensors_are_written_once(trained, tmp_path):
    model, _ = trained
    sluice.torch.save_file(model.state_dict(), tmp_path / "a.safetensors", {"step": "3"})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3", "lm_head.weight": "transformer.wte.weight"}
        assert len(file.keys()) == len(model.state_dict()) - 1
    plain = small_gpt2(seed=9)
    load_model(plain, tmp_path / "a.safetensors")
    assert same_values(values_of(plain), values_of(model))


def test_what_a_file_cannot_hold_is_named_and_leaves_nothing(tmp_path):
    whole = {"a": torch.ones(3)}
    sluice.torch.save_file(whole, tmp_path / "a.safetensors")
    for wrong in (torch.ones(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3, dtype=torch.complex128), 3):
        with pytest.raises(sluice.InvalidArgumentError, match="'b' is"):
            sluice.torch.save_file({"b": wrong}, tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError):
        sluice.torch.save_file(whole, tmp_path / "none" / "a.safetensors")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "b").mkdir()
        sluice.torch.save_file(whole, tmp_path / "b")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "b"]
    assert same_values(load_file(tmp_path / "a.safetensors"), whole)


def test_where_there_is_no_room_what_was_saved_before_stands(trained, tmp_path):
    """This process may write files of 64 KiB at most for a while, as on a disk without room; and a folder has gone."""
    model, file = trained[0], tmp_path / "a.safetensors"
    engine = sluice.torch.engine_of(model)
    sluice.torch.save_file({"a": torch.ones(3)}, file)
    checkpoint, before = engine.save(tmp_path / "out"), resource.getrlimit(resource.RLIMIT_FSIZE)
    saved = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        with pytest.raises(OSError, match="cannot be written, and what was there before stands: File too large: .*/a.safetensors'"):
            sluice.torch.save_file(model.state_dict(), file)
        with pytest.raises(sluice.BudgetError, match="raise the limit"):
            engine.save(tmp_path / "out")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        with pytest.raises(sluice.Error, match="cannot write into the folder '.*/out': File too large .*; the file would pass a limit"):
            engine.save(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(FileNotFoundError, match="cannot be written.*/none/a.safetensors'"):
        sluice.torch.save_file(model.state_dict(), tmp_path / "none" / "a.safetensors")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == saved
    shutil.rmtree(tmp_path / "out")
    assert engine.save(tmp_path / "out") == checkpoint and (tmp_path / "out").is_dir()


def test_types_and_shapes_of_a_file(tmp_path):
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4),
        "long": torch.arange(5_000_000, dtype=torch.int32),
    }
    sluice.torch.save_file(tensors, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}])
def test_a_checkpoint_of_the_engine_after_forward_passes(options, tmp_path):
    def begun():
        model, optimizer = wrap(small_gpt2(), "disk", units=units_of_modules(small_gpt2()), **options)
        train(model, optimizer, language_loss, steps=2)
        return model, optimizer

    expected = run_on(*begun())
    model, optimizer = begun()
    engine = sluice.torch.engine_of(model)
    before = language_loss(model, 9)
    engine.save(tmp_path)
    graph = language_loss(model, 9)
    assert same_outcome(run_on(model, optimizer), expected)
    model(tokens(0))
    engine.load(tmp_path)
    assert torch.equal(language_loss(model, 9), before)
    for old in (graph, before):
        with pytest.raises(RuntimeError, match="before .* was changed"):
            old.backward()
    assert same_outcome(run_on(model, optimizer), expected)


def test_a_checkpoint_among_gradients_says_when_to_make_it(trained, tmp_path):
    model, optimizer = trained
    engine = sluice.torch.engine_of(model)
    language_loss(model, 0).backward()
    kept = model.lm_head.weight.grad
    for call in (engine.save, engine.load):
        with pytest.raises(
            sluice.StateError, match=r"'transformer.*have gradients.*after optimizer.step\(\).*set_to_none"
        ):
            call(tmp_path)
    optimizer.zero_grad(set_to_none=True)
    engine.save(tmp_path)
    with pytest.raises(sluice.StateError, match="given up"):
        kept.sum()
    language_loss(model, 0).backward()
    optimizer.step()
    model.lm_head.weight.grad.sum()
    engine.save(tmp_path)
    assert run_on(model, optimizer)


def test_a_checkpoint_between_updates_in_backward_says_when_to_make_it(tmp_path):
    model, optimizer = wrap(small_gpt2(), "memory", update_in_backward=True)
    language_loss(model, 0).backward()
    with pytest.raises(sluice.StateError, match=r"saved between backward and optimizer.step\(\)"):
        sluice.torch.engine_of(model).save(tmp_path)
    optimizer.step()
    sluice.torch.engine_of(model).save(tmp_path)


def same_outcome(a, b):
    return a[0] == b[0] and same_values(a[1], b[1])


def run_on(model, optimizer):
    return train(model, optimizer, language_loss, steps=2).values, values_of(model)


@pytest.mark.parametrize(
    "options",
    [
        {"state": "8bit"},
        {"optimizer": sluice.Lion(lr=1e-4)},
        {"optimizer": sluice.Adafactor(beta1=0.9), "state": "bf16"},
        {"optimizer": sluice.Muon(adamw_lr=1e-4), "state": "8bit", "bf16": True},
    ],
)
def test_a_run_goes_on_from_both_state_dicts_with_the_same_bits(options, tmp_path):
    def made(seed, place):
        kind = torch.bfloat16 if options.get("bf16") else torch.float32
        return wrap(small_gpt2(seed).to(kind), place, **{k: v for k, v in options.items() if k != "bf16"})

    model, optimizer = made(1, "disk")
    train(model, optimizer, language_loss, steps=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    losses, values = run_on(model, optimizer)
    other, its_optimizer = made(9, "memory")
    state = torch.load(tmp_path / "state.pt")
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    its_losses, its_values = run_on(other, its_optimizer)
    assert its_losses == losses and same_values(its_values, values)


def test_state_of_another_kind_is_refused_and_nothing_is_changed(trained):
    model, optimizer = trained
    before = optimizer.state_dict()

    def refused(match, change):
        state = copy.deepcopy(before)
        change(state)
        with pytest.raises(sluice.InvalidArgumentError, match=match):
            optimizer.load_state_dict(state)

    refused("keeps exp_avg, exp_avg_sq.*same optimizer", lambda s: s["state"][3].pop("exp_avg_sq"))
    refused("max_exp_avg_sq", lambda s: s["state"][3].update(max_exp_avg_sq=torch.zeros(1)))
    refused("has the shape", lambda s: s["state"][3].update(exp_avg=torch.zeros(1)))
    sparse = torch.zeros(before["state"][3]["exp_avg"].shape).to_sparse()
    for array in ("text", [1.0], sparse, torch.zeros(sparse.shape, device="meta")):
        refused("where a tensor with values is needed", lambda s, array=array: s["state"][3].update(exp_avg=array))
    for step in (float("nan"), 2.0**60, -1, 1.5, "text", torch.zeros(2)):
        refused("'step' of .* where a whole number", lambda s, step=step: (
            s["state"][0]["exp_avg"].fill_(7.0), s["state"][max(s["state"])].update(step=step), s["param_groups"][0].update(lr=7.0)))
    refused("where a dict of its arrays is needed", lambda s: s["state"].update({3: [1]}))
    refused("of parameter 1000", lambda s: s["state"].update({1000: {}}))
    refused("betas", lambda s: s["param_groups"][0].update(betas=(0.5, 1.6), lr=7.0))
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, arrays in before["state"].items():
        assert all(torch.equal(after["state"][index][name], value) for name, value in arrays.items())


@measures_the_process
def test_state_without_room_is_refused():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))  # 384 MiB with its state
    model, optimizer = wrap(model, None, memory=resident_bytes() + (560 << 20), disk=None, reserve="64MiB")
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    with pytest.raises(sluice.BudgetError, match=r"state_dict takes 192 MiB more.*save\(folder\)"):
        optimizer.state_dict()
