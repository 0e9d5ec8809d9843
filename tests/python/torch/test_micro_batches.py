"""Each rank's micro-batches: together they are those of one rank, whatever the number of ranks."""

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built

import sluice
import sluice.torch

SAMPLES, BATCH, ACCUMULATE = 53, 2, 4
STEPS = SAMPLES // (BATCH * ACCUMULATE)


def batches_of(monkeypatch, rank, size, **given):
    """A rank's sampler, where torchrun has started `size` ranks."""
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    return sluice.torch.MicroBatches(SAMPLES, **({"batch": BATCH, "accumulate": ACCUMULATE} | given))


def by_steps(monkeypatch, size, epochs=2, **given):
    """The global micro-batches of each step, put together of what all ranks have."""
    ranks = [batches_of(monkeypatch, rank, size, **given) for rank in range(size)]
    steps = []
    for _ in range(epochs):
        each = [list(rank) for rank in ranks]
        share = ranks[0].of_rank
        assert all(len(found) == len(rank) == STEPS * share for rank, found in zip(ranks, each, strict=True))
        steps += [[one for rank in each for one in rank[share * s : share * (s + 1)]] for s in range(STEPS)]
    return steps


@pytest.mark.parametrize("given", [{}, {"shuffle": False}, {"seed": 7}])
def test_any_number_of_ranks_has_the_same_steps(monkeypatch, given):
    alone = by_steps(monkeypatch, 1, **given)
    assert alone == by_steps(monkeypatch, 2, **given) == by_steps(monkeypatch, 4, **given)
    for epoch in range(2):
        seen = [i for step in alone[epoch * STEPS :][:STEPS] for batch in step for i in batch]
        assert len(seen) == len(set(seen)) == STEPS * BATCH * ACCUMULATE and set(seen) <= set(range(SAMPLES))


def test_the_order_follows_seed_and_epoch(monkeypatch):
    first = by_steps(monkeypatch, 1)
    assert first[:STEPS] != first[STEPS:]
    assert first != by_steps(monkeypatch, 1, seed=1)
    plain = by_steps(monkeypatch, 1, epochs=1, shuffle=False)
    assert [i for step in plain for batch in step for i in batch] == list(range(STEPS * BATCH * ACCUMULATE))


@pytest.mark.parametrize("done", [0, 1, STEPS - 1, STEPS, STEPS + 2])
def test_resuming_goes_on(monkeypatch, done):
    batches = batches_of(monkeypatch, 1, 2)
    whole = [one for _ in range(3) for one in batches]
    again = batches_of(monkeypatch, 1, 2)
    again.resume(done)
    rest = list(again) + list(again)
    at = done * batches.of_rank
    assert rest == whole[at : at + len(rest)] and len(rest) == (2 * STEPS - done % STEPS) * batches.of_rank


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_samples(monkeypatch, workers):
    batches = batches_of(monkeypatch, 1, 2)
    expected = list(batches)
    batches.set_epoch(0)
    loader = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_sampler=batches, num_workers=workers)
    assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize("given, says", [
    ({"accumulate": 3}, "accumulate is 3, and there are 2 ranks"),
    ({"batch": 0}, "batch is 0"),
    ({"batch": 100}, "there are 53 samples, and a step has 4 micro-batches of 100"),
    ({"seed": -1}, "seed is -1"),
    ({"ranks": "two"}, "ranks is 'two'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(monkeypatch, given, says):
    with pytest.raises(sluice.InvalidArgumentError, match=says):
        batches_of(monkeypatch, 0, 2, **given)


@pytest.mark.parametrize("rank, size", [(2, 2), (-1, 2), ("one", 2), (0, "many")])
def test_an_environment_without_sense_is_refused(monkeypatch, rank, size):
    with pytest.raises(sluice.InvalidArgumentError, match="no rank and no number of ranks"):
        batches_of(monkeypatch, rank, size)


def test_ranks_false_is_this_process_alone(monkeypatch):
    batches = batches_of(monkeypatch, 1, 2, ranks=False)
    assert batches.of_rank == ACCUMULATE and len(batches) == STEPS * ACCUMULATE
