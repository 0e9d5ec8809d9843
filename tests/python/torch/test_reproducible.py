"""wrap(reproducible=True): the same bits at any number of ranks."""

import contextlib

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.over_ranks_models import Normed
from support.rank_pool import Pool

import sluice
import sluice.torch

ALL = 12  # micro-batches of a step


@pytest.fixture(scope="module")
def pools():
    with contextlib.ExitStack() as running:
        yield {size: running.enter_context(Pool(size)) for size in (1, 2, 3, 4)}


def trained(pool, name="gpt2", steps=2, **options):
    """What all ranks have alike, with their losses in the order of the micro-batches."""
    ranks = pool.call("train", name=name, steps=steps, accumulate=ALL, reproducible=True, **options)
    assert len({(each["digest"], tuple(each["norms"]), each["scale"]) for each in ranks}) == 1
    share = ALL // len(ranks)
    losses = [loss for step in range(steps) for each in ranks for loss in each["losses"][step * share :][:share]]
    return ranks[0] | {"losses": losses}


def test_any_number_of_ranks_gives_the_same_bits_at_every_stage(pools):
    expected = trained(pools[1], clip=0.1)
    assert expected == trained(pools[1], clip=0.1, place="disk")
    assert expected["digest"] != pools[1].call("train", steps=2, accumulate=ALL, clip=0.1)[0]["digest"]  # another order
    for size, stage, place in ((2, 0, "memory"), (2, 3, "disk"), (3, 1, "memory"), (3, 2, "disk"), (4, 0, "disk"), (4, 3, "memory")):
        assert trained(pools[size], clip=0.1, stage=stage, place=place) == expected, f"{size} ranks, stage {stage}, {place}"


@pytest.mark.parametrize("options", [
    {"name": "llama", "update": "Adafactor"},
    {"name": "mixtral", "state": "8bit"},
    {"name": "experts", "to_none": False},
    {"update": "Muon"},
    {"update": "SGD", "clip": 0.5, "infinite": 1},
])  # fmt: skip
def test_every_optimizer_and_experts_give_the_same_bits(pools, options):
    expected = trained(pools[1], **options)
    for size, stage in ((2, 1), (3, 3), (4, 2)):
        assert trained(pools[size], stage=stage, **options) == expected, f"{size} ranks, stage {stage}"


def test_gloo_gives_the_same_bits(pools):
    assert trained(pools[3], links="gloo", stage=1) == trained(pools[1])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("what, says", [
    ("early", "gradients are used after 1 micro-batches of rank 0, and a step has 2 of each rank"),
    ("late", "is added after this rank's 2 micro-batches of the step have ended"),
    ("writes", "is to be written, and the model was wrapped with reproducible=True"),
    ("sets", "is to be written, and the model was wrapped with reproducible=True"),
    ("adds", "StateError"),
    ("kept", "is added to one that was used or kept over a step"),
])  # fmt: skip
def test_what_depends_on_the_ranks_is_refused(pools, size, what, says):
    for text, goes_on in pools[size].call("unreproducible", what=what):
        assert text is not None and text.startswith("StateError") and says in text and goes_on


@pytest.mark.parametrize("options, says", [
    ({"reproducible": True}, "accumulate is 0, and reproducible=True is given"),
    ({"reproducible": True, "accumulate": 3}, "options.micro_batches is 3"),
    ({"accumulate": 3}, "options.micro_batches is 3"),
    ({"accumulate": -2}, "accumulate"),
    ({"reproducible": True, "accumulate": 4, "update_in_backward": True}, "update_in_backward"),
])  # fmt: skip
def test_what_cannot_be_is_refused(pools, options, says):
    for text, same in pools[2].call("refusal", **options):
        assert same and says in text


def test_ranks_that_compute_otherwise_are_refused(pools):
    for text in pools[2].call("other_threads"):
        assert "torch.get_num_threads(), with reproducible=True, is '2' on rank 1, and '1' on rank 0" in text


def test_running_statistics_are_refused():
    given = {"memory": "4GiB", "reserve": "64MiB", "reproducible": True, "accumulate": 4}
    with pytest.raises(sluice.InvalidArgumentError, match="'norm' .BatchNorm1d. keeps running statistics"):
        sluice.torch.wrap(Normed(), sluice.AdamW(), **given)
    model, _ = sluice.torch.wrap(Normed().eval(), sluice.AdamW(), **given)
    model(torch.ones(4, 16))
    with pytest.raises(sluice.InvalidArgumentError, match="'norm' .BatchNorm1d. keeps running statistics"):
        model.train()(torch.ones(4, 16))
    sluice.torch.close(model)


def gradients_of(accumulate):
    """What is planned for the gradients of a model with one unit of 16 MiB."""
    given = {"reproducible": True, "accumulate": accumulate} if accumulate else {}
    model = torch.nn.Linear(2048, 2048, bias=False)
    plan = sluice.torch.plan(model, sluice.SGD(lr=0.1), memory="4GiB", reserve="64MiB", **given)
    return plan["bytes"]["host"]["gradient"]


def test_the_plan_counts_the_gradients_that_are_kept():
    once = gradients_of(0)
    assert [gradients_of(count) // once for count in (1, 2, 3, 4, 5, 8, 12)] == [1, 1, 1, 2, 2, 3, 3]
