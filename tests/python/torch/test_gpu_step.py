"""The first steps of a model on a GPU take what its plan tells. The GPU is the fake one of the tests, which PyTorch's allocator takes
nothing of; or a card of this file's own, which PyTorch has."""

import collections
import gc
import re
import time
import warnings

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of
from support.wrapped_models import units_of_modules, update, wrap

import sluice
import sluice.torch
from sluice import _handle
from sluice.torch import _measures
from sluice.torch._gpu import HOST, Account, Gpu
from sluice.torch._measures import FirstStepOnGpu

MIB = 1 << 20
PLAN = {
    "predicted_peak": 900 * MIB, "budget": {"device": 1000 * MIB}, "device": 940 * MIB, "bytes": {"device": {"base": 500 * MIB}},
    "rates": {"to_gpu": 2e10, "from_gpu": 2.5e10, "both_ways": 4e10, "gpu_updates": 5e10, "cpu_memory": 1e11,
              "known": "measured"},
}  # fmt: skip


class Card:
    """A GPU of 2000 MiB, as PyTorch sees it, and what a process does to it; the clock goes on when a test says so."""

    def __init__(self):
        self.others = self.engine = self.libraries = self.reserved = self.highest = 0
        self.clock, self.captures, self.beside, self.shared = 0.0, False, 0, False

    def account(self):
        return Account(2000 * MIB - self.others - self.engine - self.libraries - self.reserved, self.engine, self.shared)

    def take(self, **grown):
        for name, mib in grown.items():
            setattr(self, name, getattr(self, name) + mib * MIB)
        self.highest = max(self.highest, self.reserved)

    def held(self):
        return self.reserved

    def begin_peak(self):
        self.highest = self.reserved

    def peak(self):
        return self.highest

    def mark(self):
        return None if self.captures else self.clock

    def seconds_between(self, first, second):
        return second - first


def first_step(card):
    made = FirstStepOnGpu(card, 1024 * MIB, 400 * MIB, 300 * MIB, card.account, 400 * MIB)
    made.planned(PLAN)
    return made


def test_what_pytorch_held_before_wrap_is_not_of_the_step():
    card = Card()
    card.take(reserved=700, libraries=100, engine=500, others=50)
    step = first_step(card)
    assert step.as_dict() == {"peak": 300 * MIB, "reserve": 400 * MIB, "measured": None, "beside": None, "host": None,
                              "host_reserve": HOST, "seconds": None}  # fmt: skip
    card.take(reserved=-600)  # the values, which have moved into the engine
    step.begin()
    card.take(reserved=250, engine=30, libraries=60)
    card.take(reserved=-50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.end()
    told = step.as_dict()
    assert (told["measured"], told["beside"]) == (250 * MIB, 60 * MIB)
    card.take(reserved=100, libraries=100)
    step.end()
    assert step.as_dict()["measured"] == 250 * MIB and step.as_dict()["beside"] == 60 * MIB, "it was the first step"


def test_more_beside_pytorch_than_the_plan_leaves_is_warned_of():
    card = Card()
    step = first_step(card)
    card.take(libraries=61, reserved=10)
    with pytest.warns(RuntimeWarning) as caught:
        step.end()
    text = str(caught[0].message)
    assert "61 MiB of the GPU's memory" in text and "leaves 60 MiB of the 1000 MiB" in text and "by other processes" in text
    facts = re.search(r"device_facts=(sluice\.DeviceFacts\(.*?\))", text)[1]
    assert eval(facts, {"sluice": sluice}) == sluice.DeviceFacts(2e10, 2.5e10, 4e10, 5e10, 1e11, "162MiB")


def test_what_other_ranks_take_of_a_gpu_that_they_share_is_not_warned_of():
    card = Card()
    card.shared = True
    step = first_step(card)
    card.take(others=300, reserved=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.end()
    assert step.as_dict()["beside"] is None and step.as_dict()["measured"] == 10 * MIB


@pytest.mark.parametrize("grown, warned", [(280, False), (290, True)])
def test_what_is_taken_of_the_host_is_told(grown, warned, monkeypatch):
    """The plan for 1024 MiB leaves 124 MiB beside the 160 MiB that are assumed for CUDA's libraries."""
    resident = 740 * MIB
    monkeypatch.setattr(_measures, "resident_bytes", lambda: resident)
    monkeypatch.setattr(_measures, "_peak_bytes", lambda: resident)
    step = first_step(Card())
    step.note(2000 * MIB)  # while the model moves in
    step.begin()
    resident += grown * MIB
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.end()
    assert step.as_dict()["host"] == grown * MIB
    assert [bool(re.search(r"took 290 MiB .* and 160 MiB were planned.*memory='1018MiB'", str(each.message))) for each in caught] == (
        [True] if warned else []
    )


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_plan_tells_how_long_each_phase_of_wrapping_took(place):
    with fake_gpu.shared():
        with torch.device(place):
            made = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        begun = time.perf_counter()
        model, _ = wrap(made, "memory", device="cuda", **GPU)
        took, ready = time.perf_counter() - begun, sluice.torch.engine_of(model).plan()["ready"]
        assert list(ready) == ["planning", "engine", "values", *["first values"] * (place == "meta")]
        assert min(ready.values()) > 0 and sum(ready.values()) < took
        sluice.torch.close(model)


def train(model, optimizer, steps):
    for step in steps:
        update(optimizer, loss_of(model, step))


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_wrapped_model_tells_what_its_steps_took(in_backward):
    with fake_gpu.shared():
        model, optimizer = wrap(Layers(), "memory", update_in_backward=in_backward, **GPU)
        told = sluice.torch.engine_of(model).plan
        assert told()["pytorch"]["beside"] is None
        train(model, optimizer, range(2))
        assert told()["step"]["compute_seconds"] is None
        made = told()["pytorch"]
        assert made["measured"] is None, "the CPU stands in for PyTorch's part"
        assert made["beside"] == 0 and made["host"] >= 0 and made["seconds"] is None
        train(model, optimizer, range(2, 5))
        made = told()
        seconds = made["pytorch"]["seconds"]
        assert 0 < seconds["waiting"] < seconds["step"]
        assert made["step"]["compute_seconds"] == pytest.approx(seconds["step"] - seconds["waiting"])
        assert made["step"]["seconds"] >= made["step"]["compute_seconds"]
        sluice.torch.close(model)
        del optimizer, told


@pytest.mark.parametrize("taken, told", [(4, True), pytest.param(80, False, marks=pytest.mark.long)])
def test_a_smaller_reserve_is_told_where_it_moves_less(taken, told, monkeypatch):
    """Of 256 MiB PyTorch gets half where nothing is stated, and the model has not all of its state beside that."""
    monkeypatch.setattr(Gpu, "peak", lambda self: taken * MIB)
    options = {"place": None, "device_memory": "256MiB", "device_facts": fake_gpu.FACTS}
    with fake_gpu.shared():
        model, optimizer = wrap(Layers(blocks=8, width=384), reserve=None, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, range(2))
        found = [re.search(r"reserve='(\d+MiB)': a step then moves (\S+) GB .*, and now (\S+) GB", str(w.message)) for w in caught]
        assert bool(found) == told
        before = sluice.torch.engine_of(model).plan()["step"]
        sluice.torch.close(model, values=False)
        del model, optimizer
        gc.collect()
        if not told:
            return
        reserve, then, now = found[0].groups()
        model, optimizer = wrap(Layers(blocks=8, width=384), reserve=reserve, **options)
        after = sluice.torch.engine_of(model).plan()["step"]
        assert [f"{(step['bytes_in'] + step['bytes_out']) / 1e9:.3g}" for step in (after, before)] == [then, now]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, range(2))
        sluice.torch.close(model, values=False)
        del model, optimizer


def test_the_engine_is_asked_nothing_at_each_use(monkeypatch):
    """The GPU waits for each question at a use of a parameter, where everything is on it."""
    counts = collections.Counter()
    call = _handle.call
    monkeypatch.setattr(_handle, "call", lambda function, *given: counts.update([function]) or call(function, *given))
    with fake_gpu.shared():
        model, optimizer = wrap(Layers(), "device", units=units_of_modules(Layers()), **GPU)
        train(model, optimizer, range(2))
        counts.clear()
        train(model, optimizer, range(1))
        parameters = len(list(model.parameters()))
        assert counts["sluice_engine_add_gradient"] == parameters
        assert counts["sluice_engine_drop_gradients"] == 1
        assert counts["sluice_engine_held"] <= counts["sluice_engine_acquire"] + counts["sluice_engine_release"]
        counts.clear()
        loss_of(model, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)
        assert counts["sluice_engine_gradient_norms"] == counts["sluice_engine_multiply_gradients"] == 1
        sluice.torch.close(model)
        del model, optimizer
