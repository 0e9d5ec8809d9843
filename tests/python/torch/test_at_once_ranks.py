"""Updates in backward over two ranks: the bits of updates at step(), and what a failure on one rank does."""

import pytest
from support.rank_pool import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name, settings", [
    ("gpt2", {"recompute": True, "clip_value": 0.001, "to_none": False}),
    ("experts", {}),
    pytest.param("gpt2", {}, marks=pytest.mark.long),
    pytest.param("mixtral", {}, marks=pytest.mark.long),
])  # fmt: skip
def test_they_have_the_bits_of_updates_at_the_step(pool, name, settings):
    settings = {"name": name, "steps": 2, "stated": True} | settings
    expected = pool.call("train", stage=0, **settings)
    assert len({each["digest"] for each in expected}) == 1
    for stage, place, more in ((1, "disk", {}), (3, "memory", {"links": "gloo"})):
        found = pool.call("train", stage=stage, place=place, update_in_backward=True, **more, **settings)
        assert found == expected, f"stage {stage}, {place}"


@pytest.mark.parametrize("options", [pytest.param({"state": "8bit"}, marks=pytest.mark.long), {"update": "Adafactor"}, {"update": "Muon"}])
def test_every_optimizer_gives_the_same_bits(pool, options):
    expected = pool.call("train", stage=0, steps=2, **options)
    assert pool.call("train", stage=3, place="disk", steps=2, stated=True, update_in_backward=True, **options) == expected


@pytest.mark.parametrize("what", ["evaluate", "save"])
def test_one_rank_alone(pool, what):
    settings = {"steps": 2, "stage": 3, "stated": True, "update_in_backward": True}
    assert pool.call("train", alone=what, **settings) == pool.call("train", **settings)


def test_a_backward_pass_that_fails_before_its_sums_is_done_again(pool):
    assert pool.call("failing_backward", when="early") == [1, 1]


def test_one_that_fails_later_is_an_error_on_all_ranks(pool):
    for text in pool.call("failing_backward", when="late"):
        assert "is abandoned after its gradients began to be applied in backward" in text


@pytest.mark.parametrize("accumulate", [0, 4])
def test_a_step_has_one_micro_batch_of_each_rank(pool, accumulate):
    for text, same in pool.call("refusal", update_in_backward=True, accumulate=accumulate):
        assert same and f"options.micro_batches is {accumulate} with options.update_in_backward on 2 ranks" in text
