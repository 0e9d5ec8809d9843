"""The default recipe of a run is printed, recorded, and kept when the run goes on; and a model learns with it."""

import json

import pytest

from support.sluice_process import run_sluice, train

DEFAULTS = ["lr", "warmup", "schedule", "final-lr", "clip", "weight-decay"]
TINY = dict(model="tiny", seq=32, batch=4, threads=1)


@pytest.fixture
def text(tmp_path):
    """A text of words in an order that a model can learn."""
    (tmp_path / "text").write_text("".join(f"{n} and {n % 7} are a sum; " for n in range(2000)))
    return tmp_path / "text"


def record(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())["run"]


def test_it_is_printed_recorded_and_used(text, tmp_path):
    flags = dict(TINY, data=text, out=tmp_path / "out", steps=3)
    planned = run_sluice("plan", memory="512MiB", **flags)
    said = planned.stdout.decode()
    # The 4 x 12 x 128^2 parameters, with biases and norms, are fewer than the table's smallest model has.
    assert "learning rate     0.0013 of adamw, a warm-up of 40 steps" in said, said
    assert f"defaults          {', '.join(DEFAULTS)}: for adamw, 0.793 million parameters in blocks, from first values" in said
    recipe = json.loads(run_sluice("plan", "--json", memory="512MiB", **flags).stdout)["recipe"]
    assert recipe == {
        "lr": 0.0013, "warmup": 40, "schedule": "cosine", "final-lr": 0.1, "clip": 1.0, "weight-decay": 0.1, "defaults": DEFAULTS,
    }  # fmt: skip
    lines, checkpoint = train(**flags)
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.0013 * step / 40 for step in (1, 2, 3)], rel=1e-12)
    kept = record(checkpoint)
    assert kept["defaults"] == DEFAULTS
    assert {name: kept["hyperparameters"][name] for name in DEFAULTS} == {name: recipe[name] for name in DEFAULTS}
    # The trained model has weights, so that a run on another text has a tenth of the rate.
    tuned = run_sluice("plan", memory="512MiB", **flags | dict(model=checkpoint, out=tmp_path / "tuned"))
    assert "learning rate     0.00013 of adamw" in tuned.stdout.decode()
    assert f"the weights in '{checkpoint}'" in tuned.stdout.decode()


OPTIMIZERS = {
    "adamw": {},
    "adam": dict(optimizer="adam"),
    "lion": dict(optimizer="lion"),
    "sgd": dict(optimizer="sgd"),
    "sgd-momentum": dict(optimizer="sgd", momentum=0.9),
    "adafactor": dict(optimizer="adafactor"),
    "muon": dict(optimizer="muon"),
    "muon-original": dict(optimizer="muon", muon_scale="original"),
}


@pytest.mark.parametrize("case", [
    case if case == "adamw" else pytest.param(case, marks=pytest.mark.long) for case in OPTIMIZERS
])  # fmt: skip
def test_every_optimizer_learns_with_its_own(case, text, tmp_path):
    """No early step makes the loss leap, as the full rate would; and the loss beats that of a flat rate of 3e-4."""
    flags = dict(TINY, data=text, steps=60, eval_batches=4, **OPTIMIZERS[case])
    lines, _ = train(**flags, out=tmp_path / "default", eval_every=60)
    flat, _ = train(**flags, out=tmp_path / "flat", eval_every=60, lr=3e-4, warmup=0, weight_decay=0.1)
    losses = [line["loss"] for line in lines]
    assert max(losses) < losses[0] + 0.05
    assert losses[-1] < losses[0] - 0.5
    assert lines[-1]["validation_loss"] < flat[-1]["validation_loss"]
