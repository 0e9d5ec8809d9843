"""Parameters that span several units have the bits of a single unit, however they are used."""

import pytest
import torch
from support import rounding
from support.wrapped_models import plain_optimizer, same_values, train, update, values_of, wrap

import sluice
import sluice.torch
from sluice.torch import _units

GRAIN = sluice.SPAN_GRAIN
OF_USES = rounding.of_roundings(16)  # the kernels are the same; a table has two uses, in rows that repeat


@pytest.fixture(autouse=True)
def small_spans(monkeypatch):
    monkeypatch.setattr(_units, "_LARGEST_PARAMETER", GRAIN)
    monkeypatch.setattr(_units, "_SPAN", GRAIN)


class Tied(torch.nn.Module):
    """A model with an embedding of 2.5 grains that is the head too, and a layer between."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(GRAIN * 5 // 2 // 128, 128)
        self.middle = torch.nn.Linear(128, 128)

    def forward(self, ids):
        return torch.nn.functional.linear(torch.tanh(self.middle(self.table(ids))), self.table.weight)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, model.table.num_embeddings, (2, 9), generator=generator)
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def made(place, **options):
    torch.manual_seed(2)
    model = Tied()
    if place is None:
        return model, plain_optimizer(model)
    return wrap(model, place, **options)


def units(model):
    return [unit.name for unit in sluice.torch.engine_of(model).units]


@pytest.mark.parametrize("place, options", [("memory", {"update_in_backward": True}), ("disk", {})])
def test_the_losses_are_those_of_plain_pytorch(place, options):
    plain = train(*made(None), loss_of, steps=4)
    model, optimizer = made(place, **options)
    assert units(model) == ["table.weight[0:]", f"table.weight[{GRAIN}:]", f"table.weight[{2 * GRAIN}:]", "middle"]
    assert train(model, optimizer, loss_of, steps=4).close_to(plain)
    assert sluice.torch.engine_of(model).counters().touches == 0


@pytest.mark.parametrize("optimizer", [sluice.AdamW(lr=1e-3), sluice.Adafactor(lr=1e-2)])
def test_the_bits_are_the_same_in_memory_and_on_disk_and_when_clipping(optimizer):
    def run(place):
        model, own = made(place, optimizer=optimizer)
        losses = train(model, own, loss_of, steps=3, accumulate=2, clip=0.1)
        values = values_of(model)
        sluice.torch.close(model)
        assert model.table.weight.shape == (GRAIN * 5 // 2 // 128, 128) and same_values(values_of(model), values)
        return losses.values, values

    (losses, values), (others, other_values) = run("memory"), run("disk")
    assert losses == others and same_values(values, other_values)


def test_its_gradient_is_one_tensor():
    plain, _ = made(None)
    model, _ = made("disk")
    for m in (plain, model):
        loss_of(m, 0).backward()
    expected, found = plain.table.weight.grad, model.table.weight.grad
    rounding.assert_near(found + 0, expected, OF_USES)
    assert rounding.near(torch.linalg.vector_norm(found).item(), expected.double().norm().item(), 2 * OF_USES)
    found *= 0.5
    rounding.assert_near(found + 0, expected / 2, OF_USES)


# These optimizers sum over a whole parameter before it changes, so that its spans are updated together.

LONG = pytest.mark.long  # another case and another way to update show as much


class Wide(torch.nn.Module):
    """A model with matrices of 2.3 and 1.2 grains: a layer for Muon, and an embedding that a group gives to Muon."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(GRAIN * 6 // 5 // 40, 40)
        self.head = torch.nn.Linear(40, GRAIN * 23 // 10 // 40)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def made_wide(place, optimizer=None, **options):
    torch.manual_seed(2)
    groups = [{"params": ["table.weight"], "use_muon": True}]
    return wrap(Wide(), place, sluice.Muon(lr=1e-2, weight_decay=0.1), param_groups=groups, **options)


TOGETHER = {
    "adafactor": (made, sluice.Adafactor(lr=1e-2), {}),
    "adafactor in bf16": (made, sluice.Adafactor(lr=1e-2, beta1=0.9), {"master": "none", "state": "8bit"}),
    "adafactor in f16": (made, sluice.Adafactor(lr=1e-2, beta1=0.9), {"kind": torch.float16, "state": "bf16"}),
    "muon": (made_wide, None, {}),
}


@pytest.mark.parametrize("case, in_backward", [
    ("adafactor", True), ("adafactor in bf16", False), ("muon", True),
    *(pytest.param(*row, marks=LONG) for row in (("adafactor in f16", True), ("muon", False))),
])  # fmt: skip
def test_what_is_updated_together_has_the_bits_of_one_unit_anywhere(case, in_backward, monkeypatch):
    make, optimizer, options = TOGETHER[case]
    kind = options.get("kind", torch.bfloat16 if "master" in options else torch.float32)
    given = {name: value for name, value in options.items() if name != "kind"} | {"update_in_backward": in_backward}

    def run(place, largest=GRAIN):
        monkeypatch.setattr(_units, "_LARGEST_PARAMETER", largest)
        before = torch.get_default_dtype()
        torch.set_default_dtype(kind)
        try:
            model, own = make(place, optimizer=optimizer, **given)
        finally:
            torch.set_default_dtype(before)
        losses = train(model, own, loss_of, steps=2, accumulate=1 if in_backward else 2)
        return losses.values, values_of(model)

    losses, values = run("memory", 64 << 20)
    found, its_values = run("disk")
    assert found == losses and same_values(its_values, values)


def test_averages_of_rows_and_columns_are_saved_and_loaded_once(tmp_path, monkeypatch):
    def fresh(place):
        return made(place, optimizer=sluice.Adafactor(lr=1e-2, beta1=0.9))

    model, optimizer = fresh("disk")
    train(model, optimizer, loss_of, steps=2)
    folder = sluice.torch.engine_of(model).save(tmp_path / "engine")
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    expected = train(model, optimizer, loss_of, steps=2).values

    values, state = torch.load(tmp_path / "state.pt")
    shapes = {name: tuple(array.shape) for name, array in state["state"][0].items()}
    rows = GRAIN * 5 // 2 // 128
    assert shapes == {"step": (), "exp_avg": (rows, 128), "exp_avg_sq_row": (rows,), "exp_avg_sq_col": (128,)}
    for largest in (GRAIN, 64 << 20):  # also in one unit
        monkeypatch.setattr(_units, "_LARGEST_PARAMETER", largest)
        again, its_optimizer = fresh("memory")
        sluice.torch.engine_of(again).load_values(folder)
        assert same_values(values_of(again), values)
        sluice.torch.engine_of(again).load(folder)
        assert train(again, its_optimizer, loss_of, steps=2).values == expected
        third, its_optimizer = fresh("disk")
        third.load_state_dict(values)
        its_optimizer.load_state_dict(state)
        assert train(third, its_optimizer, loss_of, steps=2).values == expected


def test_a_parameter_without_a_gradient_stays_as_it_is():
    model, optimizer = made("disk", optimizer=sluice.Adafactor(lr=1e-2))
    train(model, optimizer, loss_of, steps=1)
    before = values_of(model)
    update(optimizer, model.middle(torch.ones(128)).sum())
    after = values_of(model)
    assert torch.equal(before["table.weight"], after["table.weight"])
    assert not torch.equal(before["middle.weight"], after["middle.weight"])
    state = optimizer.state_dict()["state"]
    assert state[0]["step"] == 1 and state[1]["step"] == 2
