"""Native training in f16 and its loss scale: the schedule of torch.amp.GradScaler, twins, kills, and what is refused."""

import json

import pytest
import torch
from kill_campaign import PLACES, final_files, losses
from safetensors.torch import load_file
from support.runs import common, sluice, without_earlier
from support.sluice_process import run_sluice

# The interval is so short that the scale becomes too large again and again.
STEPS = 12
OFTEN = ["--initial-scale", str(2**24), "--scale-growth-interval", "2", "--schedule", "constant", "--steps", str(STEPS)]


def words_of(place, name, *more, model="tiny", dtype="f16"):
    words = without_earlier([*common(place, model, dtype, "--memory", "600MiB", *OFTEN), *more])
    output = ["--out", str(place / name), "--metrics", str(place / f"{name}.jsonl"), "--progress", "none"]
    return ["train", *words, *output]


def rows_of(place, name):
    return [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]


def test_the_scale_is_that_of_gradscaler_over_the_same_steps(place):
    sluice(*words_of(place, "schedule"))
    rows = rows_of(place, "schedule")
    skipped = [row["skipped"] for row in rows]
    assert 3 < sum(skipped) < STEPS - 3, "the sequence has both kinds of steps"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for row in rows:
        scaler.scale(weight.sum()).backward()
        assert row["loss_scale"] == scaler.get_scale()
        if row["skipped"]:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (row["gradient_norm"] is None) == row["skipped"]


@pytest.mark.parametrize("model", ["tiny-llama", *(pytest.param(model, marks=pytest.mark.long) for model in ("tiny", "wide-untied"))])
def test_skipped_steps_change_no_bit_in_any_placement(place, model):
    found = []
    for where, more in (("memory", []), ("disk", []), ("disk", ["--group", "1", "--recompute", "full"])):
        name = f"skips-{model}-{where}-{len(more)}"
        sluice(*words_of(place, name, *PLACES[where], *more, model=model))
        rows = rows_of(place, name)
        assert sum(row["disk_written"] for row in rows) > 0 or where == "memory"
        found.append(([(row["loss"], row["skipped"]) for row in rows], final_files(place / name, STEPS)))
    assert any(skipped for _, skipped in found[0][0])
    assert found[0] == found[1] == found[2]


def test_a_skipped_step_is_none_to_the_optimizer_and_uses_up_its_data(place):
    """Where the first step is skipped, the second does what a first step on its data would do."""
    scale = ["--initial-scale", str(2**40), "--steps", "1", "--warmup", "0", "--weight-decay", "0"]
    sluice(*words_of(place, "skipped", *scale))
    assert [row["skipped"] for row in rows_of(place, "skipped")] == [True]
    files = load_file(place / "skipped" / "step-00000001" / "optimizer.exp_avg.safetensors")
    assert all(not tensor.any() for tensor in files.values())
    manifest = json.loads((place / "skipped" / "step-00000001" / "manifest.json").read_text())
    assert (manifest["run"]["step"], manifest["run"]["skipped"]) == (1, 1)
    assert manifest["run"]["loss_scale"] == {"scale": 2.0**39, "applied": 0, "skipped": 1}


def test_a_run_goes_on_with_the_scale_of_its_checkpoint(place):
    """Kills, after which runs go on likewise, are in test_campaigns.py."""
    sluice(*words_of(place, "whole", *PLACES["disk"]))
    for steps in (5, STEPS):
        sluice(*words_of(place, "parts", *PLACES["disk"], "--steps", str(steps)), "--resume")
    assert any(row["skipped"] for row in rows_of(place, "parts")[5:])
    assert losses(place / "parts.jsonl") == losses(place / "whole.jsonl")
    assert final_files(place / "parts", STEPS) == final_files(place / "whole", STEPS)


@pytest.mark.parametrize("flags, text", [
    (["--dtype", "f16", "--master", "none"], "has f16 parameters, and no masters are to be kept"),
    (["--loss-scale", "64", "--scale-growth-interval", "4"], "scale-growth-interval is given"),
    (["--clip-value", "-1"], "clip-value must be 0 (none), or from 1e-30"),
])  # fmt: skip
def test_bad_settings_are_refused(flags, text, tmp_path):
    """More of them are in tests/models/run/loss_scale_test.cc."""
    (tmp_path / "text.txt").write_text("a lesson " * 100)
    refused = run_sluice("plan", "--model", "tiny", "--data", str(tmp_path / "text.txt"), *flags)
    assert refused.returncode == 2 and text in refused.stderr.decode()
