"""Parameters that span several units: the bits of a single unit, in every way that a parameter is used."""

import pytest
import torch
from wrapped_models import plain_optimizer, same, same_values, train, values_of, wrap

import sluice
import sluice.torch
from sluice.torch import _units

GRAIN = sluice.SPAN_GRAIN


@pytest.fixture(autouse=True)
def small_spans(monkeypatch):
    monkeypatch.setattr(_units, "_LARGEST_PARAMETER", GRAIN)
    monkeypatch.setattr(_units, "_SPAN", GRAIN)


class Tied(torch.nn.Module):
    """An embedding of 2.5 grains that is the head too, with a layer between."""

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


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_losses_are_those_of_plain_pytorch(place, options):
    plain = train(*made(None), loss_of, steps=5)
    model, optimizer = made(place, **options)
    assert units(model) == ["table.weight[0:]", f"table.weight[{GRAIN}:]", f"table.weight[{2 * GRAIN}:]", "middle"]
    assert train(model, optimizer, loss_of, steps=5).close_to(plain)
    assert sluice.torch.engine_of(model).counters().touches == 0


def test_the_bits_are_the_same_in_memory_and_on_disk_and_when_clipping():
    def run(place):
        model, optimizer = made(place)
        losses = train(model, optimizer, loss_of, steps=4, accumulate=2, clip=0.1)
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
    torch.testing.assert_close(found + 0, expected, rtol=1e-5, atol=1e-7)
    assert torch.linalg.vector_norm(found).item() == pytest.approx(expected.double().norm().item(), rel=1e-6)
    found *= 0.5
    torch.testing.assert_close(found + 0, expected / 2, rtol=1e-5, atol=1e-7)


def test_it_is_saved_and_loaded_as_one_tensor(tmp_path):
    model, optimizer = made("disk")
    train(model, optimizer, loss_of, steps=2)
    folder = sluice.torch.engine_of(model).save(tmp_path / "engine")
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    expected = train(model, optimizer, loss_of, steps=2).values

    again, its_optimizer = made("memory")
    sluice.torch.engine_of(again).load(folder)
    assert train(again, its_optimizer, loss_of, steps=2).values == expected

    third, its_optimizer = made("disk")
    values, state = torch.load(tmp_path / "state.pt")
    assert state["state"][0]["exp_avg"].shape == (GRAIN * 5 // 2 // 128, 128)
    third.load_state_dict(values)
    its_optimizer.load_state_dict(state)
    assert train(third, its_optimizer, loss_of, steps=2).values == expected


def test_an_edit_reaches_all_of_it():
    model, optimizer = made("disk")
    with torch.no_grad():
        model.table.weight.fill_(0.25)
    assert torch.equal(model.table.weight, torch.full_like(model.table.weight, 0.25))
    with sluice.torch.edit(model):
        model.table.weight.data[-1] = 0.5
    assert same([model.table.weight[-1], model.table.weight[0]], [torch.full((128,), 0.5), torch.full((128,), 0.25)])
    assert train(model, optimizer, loss_of, steps=1).values


def test_a_model_on_the_meta_device():
    torch.manual_seed(2)
    with torch.device("meta"):
        model = Tied()
    model, optimizer = wrap(model, "disk")
    assert model.table.weight.std().item() == pytest.approx(1, rel=0.01)
    assert train(model, optimizer, loss_of, steps=1).values
