"""Ranks of wrapped models on several hosts, as far as they know: those of one share memory, and Gloo joins hosts."""

import pytest
from support.rank_pool import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as ranks:
        yield ranks


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_hosts_give_the_bits_of_one(pool, stage):
    settings = {"stage": stage, "accumulate": 4, "clip": 0.5, "steps": 2}
    assert pool.call("train", links="hosts", **settings) == pool.call("train", **settings)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2, 3))])
def test_hosts_receive_what_the_plan_says(pool, stage):
    found = pool.call("from_hosts", stage=stage)
    for host in (found[:2], found[2:]):
        came, (_, planned) = sum(each for each, _ in host), host[0]
        assert planned > 0 and host[1][1] == planned
        if stage < 3:
            assert abs(came - planned) <= 0.01 * planned
        else:  # some parameters may still be there when they are needed again
            assert 0.3 * planned < came <= 1.01 * planned
