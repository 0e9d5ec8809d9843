"""A wrapped model over ranks: DDP's results, and the same bits at every stage, in memory, on disk and over any links."""

import re

import pytest
import torch
from support import rounding
from support.over_ranks_models import MODELS

STEPS = 3
EACH = {"sum_gradients": "each_backward", "stage": 2, "accumulate": 2}
LONG = pytest.mark.long  # other models, stages and places show as much


@pytest.fixture
def pool(pools):
    return pools[2]


def alike(results):
    """The first of results whose bits are all ranks'."""
    assert len({(each["digest"], tuple(each["norms"]), each["scale"]) for each in results}) == 1
    return results[0]


def check_twins(pool, expected, twins, **settings):
    """Checks that runs at these stages and places, over these links, have the bits of the expected one, which are all ranks'."""
    alike(expected)
    for stage, place, *links in twins:
        found = pool.call("train", stage=stage, place=place, links=links[0] if links else None, **settings)
        assert found == expected, f"stage {stage}, {place}"


def epsilon_of(name):
    return rounding.of_model(MODELS[name](), 64)


# ---- DDP as the reference ----


@pytest.mark.parametrize("name, settings", [
    ("gpt2", {"accumulate": 4, "clip": 0.5}),
    pytest.param("llama", {"accumulate": 6}, marks=LONG),
    pytest.param("mixtral", {"accumulate": 2, "clip": 0.1}, marks=LONG),
    ("experts", {"accumulate": 2, "to_none": False}),
    ("normed", {"accumulate": 4}),
])  # fmt: skip
def test_losses_norms_and_values_are_those_of_ddp(pool, tmp_path, name, settings):
    ours = pool.call("train", name=name, steps=STEPS, save=str(tmp_path / "ours"), **settings)
    theirs = pool.call("train_ddp", name=name, steps=STEPS, save=str(tmp_path / "theirs"), **settings)
    alike(ours)
    epsilon = epsilon_of(name)
    for rank in range(2):
        assert rounding.near(ours[rank]["losses"], theirs[rank]["losses"], rounding.of_losses(epsilon))
        assert rounding.near(ours[rank]["norms"], theirs[rank]["norms"], rounding.of_losses(epsilon))
    torch.manual_seed(3)
    start = dict(MODELS[name]().named_parameters())
    found, expected = torch.load(tmp_path / "ours"), torch.load(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key in start:
            rounding.assert_moved_alike(found[key], value, start[key].detach(), epsilon, key)
        else:
            rounding.assert_near(found[key], value, rounding.of_losses(epsilon), what=key)


def test_a_parameter_that_no_rank_uses_stays_as_it_is(pool, tmp_path):
    pool.call("train", name="experts", save=str(tmp_path / "after"))
    torch.manual_seed(3)
    start, after = dict(MODELS["experts"]().named_parameters()), torch.load(tmp_path / "after")
    changed = {key for key, p in start.items() if not torch.equal(p, after[key])}
    assert changed == {key for key in start if not key.startswith("experts.3.")}


def test_a_skipped_step_is_skipped_by_all(pool):
    settings = {"accumulate": 4, "clip": 0.5, "infinite": 1}
    ours, theirs = pool.call("train", **settings), pool.call("train_ddp", **settings)
    assert alike(ours)["scale"] == theirs[0]["scale"] == 512.0
    for rank in range(2):
        assert rounding.near(ours[rank]["losses"], theirs[rank]["losses"], rounding.of_losses(epsilon_of("gpt2")))


def test_losses_differ_where_gradients_are_not_averaged(pool):
    """The tolerance of the tests above tells a rank's own gradients from the mean."""
    mean, once = pool.call("train")[0]["losses"], pool.call("train", accumulate=4)[0]["losses"][::2]
    assert not rounding.near([2 * loss for loss in once], mean, rounding.of_losses(epsilon_of("gpt2")))


# ---- twins ----


EVERY = [(stage, place) for stage in range(4) for place in ("memory", "disk")][1:]
SOME = [(1, "memory"), (2, "disk"), (3, "disk")]


@pytest.mark.parametrize("name, twins", [
    ("gpt2", SOME), *(pytest.param(*row, marks=LONG) for row in (("experts", SOME), ("mixtral", SOME), ("gpt2", EVERY))),
])  # fmt: skip
def test_every_stage_and_place_gives_the_same_bits(pool, name, twins):
    settings = {"name": name, "steps": 2, "accumulate": 4, "clip": 0.1}
    check_twins(pool, pool.call("train", stage=0, **settings), twins, **settings)


@pytest.mark.parametrize("name, settings", [
    ("gpt2", {"accumulate": 4, "clip": 0.5, "infinite": 1}),
    pytest.param("gpt2", {"accumulate": 4, "recompute": True}, marks=LONG),
    ("experts", {"accumulate": 2}),
    pytest.param("mixtral", {"accumulate": 2, "clip": 0.1}, marks=LONG),
])  # fmt: skip
def test_sums_beside_backward_have_the_bits_of_those_after_it(pool, name, settings):
    settings = {"name": name, "steps": 2} | settings
    check_twins(pool, pool.call("train", stage=0, **settings), ((0, "disk"), (3, "memory", "gloo")), stated=True, **settings)


def test_a_last_backward_that_fails_on_one_rank_is_done_again_on_all(pool):
    (none, expected), (none_there, there) = pool.call("redone", fails=False, stage=3)
    assert none == none_there == [] and expected == there
    (errors, found), (errors_there, found_there) = pool.call("redone", fails=True, stage=3)
    assert errors_there == ["the script's own"]
    assert len(errors) == 1 and "rank 1 has dropped gradients while they were being summed" in errors[0]
    assert found == found_there == expected


@pytest.mark.parametrize("options", [{"state": "8bit"}, {"update": "Adafactor"}, {"update": "Muon"}])
def test_every_optimizer_gives_the_same_bits(pool, options):
    expected = pool.call("train", stage=0, steps=2, **options)
    alike(expected)
    assert pool.call("train", stage=3, place="disk", steps=2, **options) == expected
    more = {"stated": True, "update_in_backward": True}
    assert pool.call("train", stage=1, place="disk", steps=2, **more, **options) == expected


def test_gloo_gives_the_bits_of_shared_memory(pool):
    settings = {"stage": 3, "accumulate": 4, "clip": 0.5, "steps": 2}
    assert pool.call("train", links="gloo", **settings) == pool.call("train", **settings)


# ---- how they begin ----


def test_all_begin_with_the_values_of_rank_0(pool):
    assert pool.call("train", seed_of_rank=True, steps=1) == pool.call("train", steps=1)


def test_first_values_by_rules_are_those_of_rank_0(pool):
    first, second = pool.call("from_meta")
    assert first["digest"] == second["digest"]
    assert first["next"] != second["next"]


@pytest.mark.parametrize("kind", ["own", "given"])
def test_ranks_of_a_process_group(pool, kind):
    assert pool.call("of_group", kind=kind) == pool.call("train")


def test_ranks_that_find_other_checkpoints_load_none(pool, tmp_path):
    for error in pool.call("load_from_folders_that_differ", folder=str(tmp_path)):
        assert re.search("of the folder to load from rank [0-9]+ has 'step-0*1' as its newest whole checkpoint, and rank 0 'step-0*2'", error)


@pytest.mark.parametrize("differing, says", [
    (("lr", 0.5), r"InvalidArgumentError: the optimizer is \[AdamW\(lr=0.5.* on rank 1, and \[AdamW\(lr=0.001"),
    (("param_groups", [{"params": ["transformer.wte.weight"]}]),
     r"InvalidArgumentError: the optimizer is \[AdamW\(.* on rank 1, and \[AdamW\(.*\] on rank 0"),
    (("units", ["transformer.wte"]), r"InvalidArgumentError: the number of units is [0-9]+ on rank 1, and [0-9]+ on rank 0"),
    (("stage", 2), "InvalidArgumentError: stage is 2 on rank 1, and None on rank 0"),
    (("state", "bf16"), "InvalidArgumentError: state is 'bf16' on rank 1"),
])  # fmt: skip
def test_what_differs_is_refused_on_all_ranks(pool, differing, says):
    for text, same in pool.call("refusal", differing=differing, lr=1e-3):
        assert same and re.match(says, text)


@pytest.mark.parametrize("differing, says, says_there", [
    (("memory", "1MiB"), "BudgetError: rank 1 could not make its engine: 256 MiB are reserved", "BudgetError: 256 MiB are reserved"),
    (("held_units", -1), "StateError: rank 1 has an error, so that no rank goes on: held_units is -1",
     "InvalidArgumentError: held_units is -1"),
])  # fmt: skip
def test_what_one_rank_refuses_no_rank_does(pool, differing, says, says_there):
    (text, same), (text_there, same_there) = pool.call("refusal", differing=differing)
    assert same and same_there
    assert text.startswith(says) and text_there.startswith(says_there)


@pytest.mark.parametrize("options, says", [
    ({"stage": 4}, "stage is 4"),
    ({"stage": True}, "stage is True"),
    ({"update_in_backward": True}, "options.micro_batches is 0 with options.update_in_backward on 2 ranks"),
    ({"silence": 0}, "silence is 0"),
    ({"ranks": 2}, "ranks is 2"),
    ({"update_in_backward": True, "accumulate": 4}, "options.micro_batches is 4 with options.update_in_backward on 2 ranks"),
    ({"sum_gradients": "backward"}, "options.sum_gradients is 'backward'; it is 'step' (at a step's end) or 'each_backward'"),
    ({"sum_gradients": None}, "sum_gradients is None"),
    (EACH | {"stage": 1}, "and options.stage is 1; state stage 2 or 3"),
    (EACH | {"stage": None}, "and options.stage is left to the plan; state stage 2 or 3"),
    (EACH | {"accumulate": 0}, "and options.micro_batches is 0; state how many"),
    (EACH | {"reproducible": True}, "options.reproducible, which adds pairwise over all micro-batches; leave one out"),
    (EACH | {"update_in_backward": True}, "options.update_in_backward, which applies each sum; leave one out"),
])  # fmt: skip
def test_what_cannot_be_is_refused(pool, options, says):
    for text, same in pool.call("refusal", **options):
        assert same and says in text


def test_an_all_reduce_of_a_gradient_is_refused(pool):
    for text in pool.call("address_of_a_gradient"):
        assert "leave out an all_reduce() of it" in text


# ---- what one rank does alone, and what all save ----


@pytest.mark.parametrize("what, in_backward", [
    ("evaluate", False), ("save", True), pytest.param("evaluate", True, marks=LONG), pytest.param("save", False, marks=LONG),
    pytest.param("generate", False, marks=LONG), pytest.param("generate", True, marks=LONG),
])  # fmt: skip
def test_one_rank_alone(pool, what, in_backward):
    settings = {"steps": 2, "stage": 3, "stated": in_backward, "update_in_backward": in_backward}
    assert pool.call("train", alone=what, **settings) == pool.call("train", **settings)


def test_one_rank_alone_takes_the_state_that_all_have(pool):
    assert pool.call("train", alone="state", stage=0, place="disk") == pool.call("train", stage=0)


@pytest.mark.parametrize("settings, place", [
    ({"stage": 1, "others": "together", "accumulate": 4, "update": "Adafactor", "dtype": "bfloat16"}, "disk"),
    ({"stage": 3, "stated": True, "accumulate": 4}, "memory"),
    ({"stage": 3, "others": "later", "stated": True, "update_in_backward": True, "links": "gloo"}, "disk"),
    pytest.param({"stage": 2, "update": "Muon"}, "memory", marks=LONG),
])  # fmt: skip
def test_rank_0_alone_takes_the_state_of_which_each_rank_has_a_part(pool, settings, place):
    assert pool.call("take_state", place=place, **settings) == pool.call("take_state", **settings | {"stage": 0, "links": None})


@pytest.mark.parametrize("way, stage, place", [("engine", 1, "disk"), ("state_dict", 3, "memory")])
def test_a_run_goes_on_from_what_was_saved(pool, tmp_path, way, stage, place):
    for first, second in pool.call("go_on", folder=str(tmp_path), way=way, stage=stage, place=place):
        assert first == second


# ---- sums in each backward pass ----


@pytest.mark.parametrize("size, name, accumulate", [
    (2, "gpt2", 4), (2, "experts", 8), (3, "gpt2", 6), *(pytest.param(*row, marks=LONG) for row in ((2, "llama", 2), (3, "experts", 12))),
])  # fmt: skip
def test_sums_in_each_backward_have_the_bits_of_their_written_order(pools, size, name, accumulate):
    settings = {"name": name, "steps": 2, "accumulate": accumulate}
    expected = pools[size].call("train_by_reference", **settings)
    check_twins(pools[size], expected, ((2, "disk"), (3, "memory")), stated=True, sum_gradients="each_backward", **settings)


def test_sums_in_each_backward_clip_skip_and_stop_at_nothing_that_sums_at_the_step_do_not(pool):
    settings = {"stated": True, "clip": 0.1, "infinite": 1, "stage": 2}
    found = pool.call("train", sum_gradients="each_backward", **settings)
    assert found == pool.call("train", **settings)  # with one micro-batch of each rank
    several = pool.call("train", sum_gradients="each_backward", accumulate=4, **settings)
    assert alike(several)["scale"] == alike(found)["scale"] < 1024


def test_one_rank_sums_nothing_in_each_backward(pool):
    settings = {"accumulate": 4, "stated": True, "ranks": False}
    assert pool.call("train", stage=3, sum_gradients="each_backward", **settings) == pool.call("train", **settings)


@pytest.mark.parametrize("stage, place", [(2, "memory"), (3, "disk")])
def test_what_a_rank_can_do_with_the_part_that_it_adds_up(pool, stage, place):
    for first, read, norm, second, norm_of_two, third, stepped in pool.call("each_backward", stage=stage, place=place):
        assert first is second is third is stepped is None
        assert read.startswith("StateError: a gradient is read") and "what was summed in each backward pass" in read
        assert norm > 0 and norm_of_two > 0


def test_ranks_that_sum_gradients_at_other_times_are_refused(pool):
    given = {"differing": ("sum_gradients", "each_backward"), "stage": 2, "accumulate": 2}
    for text, same in pool.call("refusal", **given):
        assert same and text.startswith('InvalidArgumentError: options.sum_gradients is "each_backward" on rank 1, and "step" on rank 0'), text


# ---- updates in backward ----


@pytest.mark.parametrize("name, settings", [
    ("gpt2", {"recompute": True, "clip_value": 0.001, "to_none": False}), ("experts", {}), pytest.param("mixtral", {}, marks=LONG),
])  # fmt: skip
def test_updates_in_backward_have_the_bits_of_updates_at_the_step(pool, name, settings):
    settings = {"name": name, "steps": 2, "stated": True} | settings
    expected = pool.call("train", stage=0, **settings)
    check_twins(pool, expected, ((1, "disk"), (3, "memory", "gloo")), update_in_backward=True, **settings)


def test_a_backward_pass_that_fails_before_its_sums_is_done_again_and_later_is_an_error_on_all_ranks(pool):
    assert pool.call("failing_backward", when="early") == [1, 1]
    for text in pool.call("failing_backward", when="late"):
        assert "is abandoned after its gradients began to be applied in backward" in text


# ---- several hosts, as far as the ranks know: those of one share memory, and Gloo joins hosts ----


@LONG  # with a GPU for each rank, and where rank 0 takes the state, it is shown by others
@pytest.mark.parametrize("stage", [0, 3])
def test_hosts_give_the_bits_of_one(pools, stage):
    settings = {"stage": stage, "accumulate": 4, "clip": 0.5, "steps": 1}
    assert pools[4].call("train", links="hosts", **settings) == pools[4].call("train", **settings)


def test_rank_0_alone_takes_the_state_of_several_hosts(pools):
    assert pools[4].call("take_state", links="hosts", stage=3, others="later") == pools[4].call("take_state", stage=0)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=LONG)])
def test_hosts_receive_what_the_plan_says(pools, stage):
    found = pools[4].call("from_hosts", stage=stage)
    for host in (found[:2], found[2:]):
        came, (_, planned) = sum(each for each, _ in host), host[0]
        assert planned > 0 and host[1][1] == planned
        if stage < 3:
            assert abs(came - planned) <= 0.01 * planned
        else:  # some parameters may still be there when they are needed again
            assert 0.3 * planned < came <= 1.01 * planned
