"""Pipelines of wrapped models: the bits of one rank that wraps the whole model, checkpoints that any number of stages load, and what is
refused or fails."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from support import fake_gpu
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.families import FAMILIES
from support.rank_pool import LIMIT, Pool, run_program

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "pipelines.md"
LONG = pytest.mark.long  # others show as much


@pytest.fixture
def two(pipelines):
    return pipelines[2]


@pytest.fixture
def three(pipelines):
    return pipelines[3]


@pytest.fixture
def four(pipelines):
    return pipelines[4]


def merged(results, places=None):
    """Merges the results of the stages: each has values of its own, which are alike on its ranks, and all have the same losses and
    norms. places: where ranks are along data and pipeline."""
    assert [each["place"] for each in results] == (places or [[0, rank] for rank in range(len(results))])
    assert len({(tuple(each["losses"]), tuple(each["norms"])) for each in results}) == 1
    values, of_stages = {}, {}
    for each in results:
        assert each["values"] and of_stages.setdefault(each["place"][1], each["values"]) == each["values"]
    for own in of_stages.values():
        assert not values.keys() & own.keys()
        values |= own
    return {"losses": results[0]["losses"], "norms": results[0]["norms"], "values": values}


def wrapped(results):
    """The twin of a pipeline over data: ranks that wrap the whole model, whose losses are of their own batches."""
    assert all((each["norms"], each["values"]) == (results[0]["norms"], results[0]["values"]) for each in results)
    losses = [torch.tensor(sum(of_step) / len(of_step)).item() for of_step in zip(*(each["losses"] for each in results), strict=True)]
    return results[0] | {"losses": losses}


MESHES = {"data=2,pipeline=2": [[0, 0], [0, 1], [1, 0], [1, 1]], "pipeline=2,data=2": [[0, 0], [1, 0], [0, 1], [1, 1]]}


# ---- twins ----


def has_the_bits_of_the_whole_model(stages, two, three, given, of_two=(), of_three=()):
    """Whether 2 stages, 3, or both have them."""
    expected = two.call("whole", **given)[0]
    assert 2 not in stages or merged(two.call("piped", **given | dict(of_two))) == expected
    assert 3 not in stages or merged(three.call("piped", **given | dict(of_three))) == expected


@pytest.mark.parametrize("name, micro_batches, stages", [
    ("layers", 1, [2]), ("layers", 4, [2, 3]), ("nested", 4, [3]), ("gpt2", 2, [2, 3]), ("llama", 3, [3]), ("counting", 4, [2]),
    ("channels_last", 3, [3]),
])  # fmt: skip
def test_stages_have_the_bits_of_the_whole_model(two, three, name, micro_batches, stages):
    given = {"name": name, "micro_batches": micro_batches, "clip": 0.5}
    has_the_bits_of_the_whole_model(stages, two, three, given, of_two={"pipeline": "gpipe", "place": "disk"})


@pytest.mark.parametrize("name, stages, given, options", [
    ("layers", [2, 3], {}, {}), ("gpt2", [2], {}, {}), ("llama", [3], {}, {"recompute": True, "reserve": None}),
    ("tied", [3], {"micro_batches": 2}, {}), ("nested", [2], {"dtype": "bfloat16"}, {}), ("recurrent", [2], {}, {"place": "disk"}),
    ("experts", [2], {"micro_batches": 1}, {}), ("channels_last", [3], {}, {}), ("twice", [2], {}, {}), ("compiled", [2, 3], {}, {"units": None}),
])  # fmt: skip
def test_gradients_of_weights_may_be_apart(two, three, name, stages, given, options):
    given, own = {"name": name, "micro_batches": 4, "clip": 0.5, **given}, {"pipeline": "zb-h1", **options}
    has_the_bits_of_the_whole_model(stages, two, three, given, of_two=own, of_three=own)


def test_what_they_need_meanwhile_is_planned_for(two):
    whole, halves = (two.call("of_pytorch", pipeline=pipeline) for pipeline in ("1f1b", "zb-h1"))
    for each in whole + halves:
        assert 0 < each["measured"] <= each["reserve"], each
    # Beside a call's own memory the first stage keeps, instead of another call's 4 arrays, 6 that a backward pass has left; the last one
    # keeps 7 instead of none.
    of_array = 32768 * 256 * 4
    more = [there["reserve"] - here["reserve"] for here, there in zip(whole, halves, strict=True)]
    assert more[0] >= 2 * of_array and more[1] >= 7 * of_array, more


@pytest.mark.parametrize("stages, options", [
    ([2], {"dtype": "bfloat16"}),
    *(pytest.param(*row, marks=LONG) for row in (
        ([2], {"state": "8bit"}), ([3], {"update": "SGD"}), ([2], {"update": "Adafactor"}), ([3], {"update": "Muon"}),
        ([3], {"dtype": "bfloat16", "master": "none", "seed": 5}),
    )),
])  # fmt: skip
def test_so_they_have_with_every_optimizer_and_type(two, three, stages, options):
    given = {"name": "layers", "micro_batches": 4, **options}
    has_the_bits_of_the_whole_model(stages, two, three, given, of_two={"pipeline": "gpipe"}, of_three={"place": "disk"})


@pytest.mark.parametrize("options", [
    pytest.param({"links": "gloo"}, marks=LONG), {"recompute": True, "reserve": None}, {"stages": "0-1,2,3"},
])  # fmt: skip
def test_so_they_have_however_they_are_run(two, three, options):
    given = {"name": "gpt2", "micro_batches": 3}
    assert merged(three.call("piped", **options, **given)) == two.call("whole", **given)[0]


@pytest.mark.parametrize("name", ["layers", "tied"])
def test_first_values_by_rules_are_those_of_the_whole_model(two, three, name):
    given = {"name": name, "micro_batches": 2, "meta": True, "steps": 1}
    expected = two.call("whole", **given)[0]
    assert merged(three.call("piped", **given)) == expected


@pytest.mark.parametrize("name, options, own", [
    ("layers", {"clip": 0.5}, {"stage": 0}),
    ("experts", {"clip": 0.5, "micro_batches": 1}, {"stage": 1}),
    ("broad", {"clip": 0.5}, {"stage": 3, "pipeline": "gpipe"}),
    pytest.param("broad", {"dtype": "bfloat16"}, {"stage": 1, "place": "disk"}, marks=LONG),
    pytest.param("broad", {"update": "Adafactor"}, {"stage": 2}, marks=LONG),
    ("broad", {"state": "8bit"}, {"stage": 3, "place": "disk"}),
    ("tied", {"clip": 0.5}, {"stage": 3, "links": "gloo"}),
    ("tied", {"meta": True}, {}),
    ("tied", {"clip": 0.5, "micro_batches": 4}, {"stage": 0, "chunks": 2}),
    ("deep", {"state": "8bit"}, {"stage": 1, "chunks": 2, "place": "disk"}),
    ("broad", {"update": "Adafactor", "clip": 0.5}, {"stage": 2, "chunks": 2}),
    ("broad", {"clip": 0.5, "micro_batches": 4}, {"stage": 3, "chunks": 2, "stages": "0-1,2-3,4,5-6"}),
    ("broad", {"micro_batches": 1}, {"stage": 3, "chunks": 2, "place": "disk", "pipeline": "gpipe"}),
])  # fmt: skip
def test_ranks_along_data_have_the_bits_of_as_many_that_wrap_the_model(two, four, name, options, own):
    given = {"name": name, "micro_batches": 3} | options
    expected = wrapped(two.call("whole", data=2, **given))
    mesh = list(MESHES)["place" in own]
    found = four.call("piped", mesh=mesh, **own, **given)
    assert merged(found, MESHES[mesh]) == expected
    assert [each["shards"] > 0 for each in found] == [name == "broad" and own.get("stage") == 3] * 4


OF_SIX = [[data, stage] for data in range(2) for stage in range(3)]


@pytest.mark.parametrize("ranks, name, given, own", [
    (2, "gpt2", {"micro_batches": 4}, {"pipeline": "gpipe", "place": "disk"}),
    (2, "experts", {"clip": 0.5}, {"mesh": "data=2", "stage": 1}),
    (2, "tied", {"update": "SGD"}, {"pipeline": "zb-h1"}),
    (2, "twice", {}, {"pipeline": "zb-h1"}),
    (3, "tied", {"clip": 0.5}, {}),
    (3, "deep_tied", {"micro_batches": 3, "state": "8bit"}, {"chunks": 2, "place": "disk"}),
    (3, "llama", {"dtype": "bfloat16", "master": "none"}, {"pipeline": "zb-h1"}),
    (4, "experts", {"clip": 0.5}, {"mesh": "data=2,pipeline=2", "pipeline": "zb-h1", "stage": 0}),
    (4, "tied", {"clip": 0.5}, {"mesh": "pipeline=2,data=2", "chunks": 2, "stage": 3}),
    (4, "nested", {"clip": 0.5, "micro_batches": 12}, {"mesh": "data=2,pipeline=2", "exchanged": 24}),
    (4, "nested", {"dtype": "bfloat16", "update": "Adafactor"}, {"mesh": "data=2,pipeline=2", "pipeline": "gpipe", "stage": 2}),
    pytest.param(6, "tied", {"clip": 0.5, "update": "Muon"}, {"mesh": "data=2,pipeline=3", "pipeline": "zb-h1"}, marks=LONG),
    pytest.param(6, "deep_gpt2", {"state": "8bit"}, {"mesh": "data=2,pipeline=3", "chunks": 2, "place": "disk"}, marks=LONG),
])  # fmt: skip
def test_reproducible_pipelines_have_the_bits_of_one_rank_on_any_mesh(pipelines, two, ranks, name, given, own):
    """The pipelines share out the micro-batches of one batch."""
    given = {"name": name, "micro_batches": 6, "reproducible": True} | given
    expected = two.call("whole", **given)[0]
    places = {"data=2": [[0, 0], [1, 0]], "data=2,pipeline=3": OF_SIX, **MESHES}.get(own.get("mesh"))
    assert merged(pipelines[ranks].call("piped", **own, **given), places) == expected
    assert two.call("whole", **given | {"reproducible": False})[0]["values"] != expected["values"]


def test_parameters_without_gradients_change_no_bit_of_the_norm_on_any_number_of_ranks(two):
    given = {"name": "nested", "clip": 0.5, "reproducible": True}
    alone = two.call("whole", micro_batches=6, **given)[0]
    for each in two.call("whole", data=2, micro_batches=3, **given):
        assert (each["norms"], each["values"]) == (alone["norms"], alone["values"])


def test_a_reproducible_step_has_one_batch(two):
    for texts, loss in two.call("reproducible_again"):
        assert len(texts) == 2 and all("call optimizer.zero_grad() before, after the optimizer.step()" in text for text in texts) and loss > 0


def test_shares_of_what_is_evaluated_may_be_unlike(two):
    found = two.call("evaluated_unequally")
    assert found[0] == found[1] > 0


def test_data_alone_is_a_mesh(two):
    given = {"name": "broad", "micro_batches": 2, "clip": 0.5}
    found = two.call("piped", mesh="data=2", stage=3, **given)
    assert merged(found, [[0, 0], [1, 0]]) == wrapped(two.call("whole", data=2, **given))


@pytest.mark.parametrize("stages, name, given, options", [
    ([2, 3], "deep", {"micro_batches": 4}, {}), ([2, 3], "deep", {"micro_batches": 1}, {"pipeline": "gpipe"}),
    ([3], "deep", {"micro_batches": 2, "state": "8bit"}, {"place": "disk"}), ([2], "nested", {"micro_batches": 6}, {}),
    ([3], "deep", {"micro_batches": 4, "dtype": "bfloat16", "master": "none"}, {"links": "gloo"}),
    ([3], "deep_gpt2", {"micro_batches": 4, "steps": 1}, {"recompute": True, "reserve": None}),
    ([2, 3], "deep_tied", {"micro_batches": 6}, {}), ([3], "deep_tied", {"micro_batches": 2, "meta": True, "steps": 1}, {"pipeline": "gpipe"}),
    ([2], "deep", {"micro_batches": 3, "update": "Muon"}, {"chunks": 3, "stages": "0-1,2-3,4,5-6,7,8-9"}),
    ([2], "bloom", {"micro_batches": 3, "steps": 1}, {"place": "disk"}), ([2], "hooked", {"micro_batches": 4, "update": "SGD"}, {}),
])  # fmt: skip
def test_interleaved_stages_have_the_bits_of_the_whole_model(two, three, stages, name, given, options):
    given, options = {"name": name, "clip": 0.5, **given}, {"chunks": 2, **options}
    has_the_bits_of_the_whole_model(stages, two, three, given, of_two=options, of_three=options)


def test_interleaved_stages_have_several_groups_of_blocks(two):
    assert two.call("places", chunks=2, stages="0,1-2,3,4-5") == [[[0, 3], 0], [[1, 2, 4, 5], 0]]
    assert two.call("places", chunks=3) == [[[0, 2, 4], 0], [[1, 3, 5], 0]]


def test_another_order_of_sums_is_seen(two):
    """The comparison tells one number of micro-batches from another."""
    expected, other = (two.call("whole", name="layers", micro_batches=m)[0] for m in (2, 4))
    assert expected["values"] != other["values"]


@pytest.mark.parametrize("stages, name, given, options", [
    ([2, 3], "tied", {}, {}), ([3], "opt", {"update": "SGD"}, {}),
    pytest.param([3], "hooked", {}, {"pipeline": "gpipe"}, marks=LONG), pytest.param([2], "gemma", {"dtype": "bfloat16"}, {}, marks=LONG),
])  # fmt: skip
def test_embedding_and_head_may_share_a_table(two, three, stages, name, given, options):
    given = {"name": name, "micro_batches": 6, "clip": 0.5} | given
    has_the_bits_of_the_whole_model(stages, two, three, given, of_two={"place": "disk", **options}, of_three=options)


def test_a_model_whose_code_reads_its_heads_type_is_cut(two, three):
    given = {"name": "mamba", "micro_batches": 2, "steps": 1, "units": None}
    assert merged(three.call("piped", **given)) == two.call("whole", **given)[0]


@LONG
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_guide_has_the_bits_of_the_whole_model(two, three, name):
    given = {"name": name, "micro_batches": 2, "clip": 0.5, "steps": 2}
    has_the_bits_of_the_whole_model([2, 3], two, three, given, of_two={"pipeline": "gpipe"})
    has_the_bits_of_the_whole_model([2], two, three, given, of_two={"chunks": 2})


def test_the_guide_names_the_families_that_are_tested():
    (text,) = re.findall(r"had the bits of one rank \([0-9-]+\):\s+(.*?)\.\n", GUIDE.read_text(), re.DOTALL)
    told = " ".join(text.split()).replace("Gemma 2 and 3", "Gemma 2, Gemma 3").replace("Llama (also with LoRA)", "Llama, Llama with LoRA")
    assert told.split(", ") == list(FAMILIES)


def test_shapes_and_modes_may_change_from_step_to_step(two, three, four):
    assert two.call("shapes", chunks=2) == [[True] * 6] * 2
    assert three.call("shapes") == [[True] * 6] * 3
    assert four.call("shapes", mesh="data=2,pipeline=2") == [[True] * 6] * 4


@pytest.mark.parametrize("name", ["tied", "layers"])
def test_a_batch_is_evaluated_as_by_the_whole_model(two, three, name):
    of_last, reserve = ([True] * 4, "64MiB") if name == "tied" else ([True] * 3, None)
    assert three.call("evaluated", name=name, reserve=reserve) == [[True] * 6, [True] * 3, of_last]
    assert two.call("evaluated", name=name, chunks=2, reserve=reserve) == [[True] * 6, of_last]


def test_a_loss_may_be_the_mean_over_all_labels(two, four):
    of_four = [each for way in (False, True) for each in four.call("of_all_labels", mesh="data=2,pipeline=2", reproducible=way)]
    for found, expected in [*two.call("of_all_labels"), *of_four]:
        assert found == pytest.approx(expected, rel=1e-6)


def test_groups_are_of_the_whole_model(two):
    (first, count), (second, other_count) = two.call("groups")
    assert first == [[1, 0.1, 0.0], [1, 0.5, 0.01], [0, 0.1, 0.01]] and second == [[1, 0.1, 0.0], [0, 0.5, 0.01], [1, 0.1, 0.01]]
    assert count == other_count == 3


def test_layers_may_be_frozen_between_steps(two):
    assert two.call("thawed") == two.call("thawed", chunks=2) == [[True] * 6] * 2


def test_all_layers_of_a_stage_may_be_frozen_between_steps(two):
    """In such a step that stage has no gradients."""
    assert two.call("thawed", frozen="01") == two.call("thawed", frozen="23") == [[True] * 6] * 2


# ---- what a stage holds ----


def test_what_one_stage_cannot_do_or_ranks_do_differently_is_refused(two, four):
    norm = "call clip_grad_norm_() of the Pipeline"
    expected = [
        norm, norm, "without a GradScaler", "save() of the Pipeline", "one stage's part", "one stage's part", "what all blocks give", "the calls differ on rank",
        "the values of the batch differ", "max_norm is", "its groups have", "the Pipeline was closed",
    ]  # fmt: skip
    for found in [*two.call("misused"), *four.call("misused", mesh="data=2,pipeline=2", stage=3)]:
        for words, text in zip(expected, found, strict=True):
            assert text is not None and words in text, text


def test_gradients_that_are_not_finite_are_refused_on_all_ranks(two, four):
    of_four = four.call("not_finite", mesh="data=2,pipeline=2")
    for text, same, changed, loss in [*two.call("not_finite"), *two.call("not_finite", chunks=2), *of_four]:
        assert "not finite" in text and same and changed and loss > 0


def test_a_step_without_any_gradient_is_refused_on_all_ranks(two):
    for text, loss in two.call("without_gradients"):
        assert "no parameter of any stage has a gradient" in text and loss > 0


# ---- checkpoints ----


@pytest.mark.parametrize("name, chunks, other", [
    ("tied", 1, 2), ("deep", 2, 1), *(pytest.param(*row, marks=LONG) for row in (("llama", 1, 2), ("deep_tied", 2, 2))),
])  # fmt: skip
def test_checkpoints_are_those_of_one_rank_and_any_number_of_stages_goes_on(two, three, tmp_path, name, chunks, other):
    """Three stages have so many chunks, and two that load the other number."""
    given = {"name": name, "micro_batches": 4, "scheduled": False}
    expected = two.call("whole", steps=2, **given)[0]
    three.call("piped", save=str(tmp_path / "three"), steps=1, chunks=chunks, **given)
    two.call("whole", save=str(tmp_path / "one"), steps=1, **given)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*/*")}
    assert len(files) > 4 and {path.name: path.read_bytes() for path in (tmp_path / "three").glob("*/*")} == files
    rest = given | {"load": str(tmp_path / "three"), "first": 1, "steps": 1}
    of_two, of_three = two.call("piped", chunks=other, **rest), three.call("piped", **rest)
    for found in (two.call("whole", **rest)[0], merged(of_two), merged(of_three)):
        assert found["values"] == expected["values"] and found["losses"] == expected["losses"][1:]
    of_three = three.call("piped", chunks=chunks, **rest | {"load": str(tmp_path / "one")})
    assert merged(of_three)["values"] == expected["values"]


@pytest.mark.parametrize("stage, chunks", [(0, 1), (3, 2)])
def test_checkpoints_of_a_mesh_are_those_of_wrapped_ranks_and_any_other_goes_on(two, four, tmp_path, stage, chunks):
    given, mesh = {"name": "broad", "micro_batches": 2, "scheduled": False}, "data=2,pipeline=2"
    expected = wrapped(two.call("whole", data=2, steps=2, **given))
    saved = four.call("piped", mesh=mesh, stage=stage, chunks=chunks, save=str(tmp_path / "mesh"), steps=1, **given)
    two.call("whole", data=2, save=str(tmp_path / "wrapped"), steps=1, **given)
    files = {path.name: path.read_bytes() for path in (tmp_path / "wrapped").glob("*/*")}
    assert len(files) > 4 and {path.name: path.read_bytes() for path in (tmp_path / "mesh").glob("*/*")} == files
    rest, other = given | {"load": str(tmp_path / "mesh"), "first": 1}, "pipeline=2,data=2"
    found = merged(four.call("piped", mesh=other, stage=3 - stage, chunks=3 - chunks, steps=1, **rest), MESHES[other])
    assert found["values"] == expected["values"] and found["losses"] == expected["losses"][1:]
    assert merged(two.call("piped", steps=0, chunks=chunks, **rest))["values"] == merged(saved, MESHES[mesh])["values"]


def test_folders_that_not_all_ranks_see_are_refused_and_end_nothing(two, tmp_path):
    for text, made in two.call("unseen", folder=str(tmp_path)):
        assert "rank 1 cannot write the checkpoint" in text and "where each stage of a pipeline writes its part" in text and made


def test_transformers_reads_a_checkpoint_of_stages(two, tmp_path):
    for tensors, same in two.call("read_by_transformers", folder=str(tmp_path)):
        assert tensors > 4 and same


@pytest.mark.parametrize("chunks", [1, 2])
def test_values_come_from_files_to_each_stage(two, tmp_path, chunks):
    (first, same), (second, same_there) = two.call("from_weights", folder=str(tmp_path), chunks=chunks)
    assert same and same_there and first + second == 39


# ---- what is refused ----


@pytest.mark.parametrize("what, options, words", [
    ("fewer", {}, ["a pipeline of 2 stages is asked for, and the model has 1 blocks"]),
    ("without", {}, ["of the 2 blocks too few have parameters for 2 stages"]),
    ("without", {"stages": "0,1"}, ["stage 1 has the blocks 1 to 1, and no parameter that is trained"]),
    ("frozen", {}, ["stage 1 has the blocks 1 to 1, and no parameter that is trained"]),
    ("shared", {}, ["'2.weight', which stage 1 needs, is the same tensor as '0.weight' of stage 0"]),
    ("tied", {}, ["the batch has no input_ids", "head and embedding share a table"]),
    ("beside", {}, ["'transformer.scale' is a parameter beside the blocks"]),
    ("module", {}, ["Nested is neither a torch.nn.Sequential nor a causal model of transformers"]),
    ("numbers", {}, ["a list of torch.nn.Module is needed"]),
    ("linears", {"stages": "0,1,2"}, ["the cut '0,1,2' goes on with '2' after block 1"]),
    ("linears", {"stages": "0-1"}, ["the cut '0-1' has 1 groups of blocks, and there are 2 stages"]),
    ("linears", {"stages": "zero,one"}, ["'zero' where the number of a block must be"]),
    ("linears", {"micro_batches": 3}, ["the batch has tensors of", "a multiple of micro_batches"]),
    ("linears", {"targets": "numbers"}, ["the batch has a list of 8 numbers", "tensors alone are cut into micro-batches"]),
    ("linears", {"targets": "array"}, ["the batch has a ndarray", "tensors alone are cut into micro-batches"]),
    ("linears", {"gradients": False}, ["StateError: gradients are off", "or call evaluate()"]),
    ("mixtral", {}, ["output_router_logits is set", "asks for what all blocks give"]),
    ("linears", {"micro_batches": 0}, ["micro_batches is 0"]),
    ("linears", {"pipeline": "interleaved"}, ["pipeline is 'interleaved'; it is one of '1f1b', 'gpipe', 'zb-h1'"]),
    ("four", {"pipeline": "zb-h1", "chunks": 2}, ["'zb-h1' is for stages of one chunk each, and 2 are asked for"]),
    *(("four", {"chunks": chunks}, [f"chunks is {chunks}; it is how many chunks of layers each stage has, a whole number from 1 to 1024"])
      for chunks in (0, -1, 1.5, True)),
    ("linears", {"chunks": 2}, ["a pipeline of 2 stages of 2 chunks each is asked for, and the model has 2 blocks", "or fewer chunks"]),
    ("four", {"chunks": 2, "stages": "0-1,2-3"}, ["has 2 groups of blocks, and there are 2 stages of 2 chunks each: give 4, the first ones of"]),
    ("four", {"chunks": 2, "mesh": "data=2"}, ["chunks is 2", "there is no pipeline", "or leave it out"]),
    ("four", {"stages": "abc", "mesh": "data=2"}, ["stages is 'abc', which says which layers", "there is no pipeline", "or leave it out"]),
    ("four", {"of_ranks": [{"chunks": 1}, {"chunks": 2}]}, ["chunks is 2 on rank 1, and 1 on rank 0"]),
    ("four", {"of_ranks": [{"reproducible": True}, {}]}, ["reproducible is False on rank 1, and True on rank 0"]),
    ("four", {"of_ranks": [{}, {"reproducible": True}], "mesh": "data=2"}, ["reproducible is True on rank 1, and False on rank 0"]),
    ("four", {"of_ranks": [{"micro_batches": 2}, {"micro_batches": 4}], "mesh": "data=2"}, ["micro_batches is 4 on rank 1, and 2 on rank 0"]),
    ("four", {"rows": [8, 4], "mesh": "data=2", "reproducible": True}, ["the shares of a reproducible step's batch differ on rank 1 and rank 0"]),
    ("without_third", {"chunks": 2}, ["of the 4 blocks too few have parameters for 2 stages of 2 chunks each"]),
    ("without_third", {"chunks": 2, "stages": "0,1,2,3"}, ["chunk 1 of stage 0 has the blocks 2 to 2, and no parameter; each chunk needs one"]),
    ("shared_of_three", {"chunks": 2}, ["'2.weight', which chunk 1 of stage 0 needs, is the same tensor as '0.weight' of chunk 0 of stage 0"]),
    ("four", {"chunks": 2, "units": {"both": ["0", "2"]}}, ["the unit 'both' has parameters of several chunks"]),
    ("linears", {"mesh": "data=2,pipeline=2"}, ["the mesh 'data=2,pipeline=2' is of 4 ranks, and there are 2"]),
    ("linears", {"mesh": "data=2,tensor=1"}, ["has an axis 'tensor'", "may have data and pipeline"]),
    ("normed", {"reproducible": True}, ["'2' (BatchNorm1d) keeps running statistics", "reproducible=True is given"]),
    ("linears", {"device": ["cuda:0", "cuda:1"]}, ["a list is given as devices", "torchrun --nproc-per-node 2"]),
    ("linears", {"devices": ["cuda:0", "cuda:1"], "device_memory": "1GiB"}, ["this one is one of 2 ranks: leave devices out"]),
    ("linears", {"update_in_backward": True}, ["update_in_backward is given to a Pipeline"]),
    ("linears", {"microbatches": 4}, ["TypeError", "microbatches"]),
    ("linears", {"units": {"all": ["0", "1"]}}, ["the unit 'all' has parameters of several stages"]),
    ("linears", {"differs": True}, ["the values of the batch differ on rank"]),
    ("linears", {"memory": "64MiB"}, ["BudgetError"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_on_all_ranks(two, what, options, words):
    for text in two.call("refused", what=what, **options):
        assert text is not None and all(word in text for word in words), text


def test_what_interleaved_stages_hold_is_planned_for(two):
    """With 1F1B there is room for it; where all forward passes come first there is not."""
    given = {"what": "held", "chunks": 2, "micro_batches": 12, "rows": 12 * 1024}
    assert two.call("refused", **given) == [None, None]
    with Pool(2, "over_pipelines") as ranks:  # which an error ends
        for text in ranks.call("refused", pipeline="gpipe", **given):
            assert "(with 368 MiB that other calls keep for backward)" in text, text


def test_the_trace_of_a_stage_has_its_passes_waits_and_messages(two, tmp_path):
    for stage, events in enumerate(two.call("traced", path=str(tmp_path / "trace"))):
        passes = [name for lane, name, _ in events if lane == "compute"]
        assert sorted(passes) == [f"{way} of micro-batch {item}" for way in ("backward", "forward") for item in range(3)]
        assert passes.index("forward of micro-batch 2") < passes.index("backward of micro-batch 2")
        messages = [(name, size) for lane, name, size in events if lane == "message"]
        for way in ("on", "back"):  # what the other stage gives, and what it gets
            assert messages.count((f"the tensors that stages pass {way} (border 1)", 2 * 8 * 4)) == 3, (stage, messages)
        waits = {name for lane, name, _ in events if lane == "rank wait"}
        assert waits >= {f"the tensors that stages pass {way} (border 1)" for way in ("on", "back")}, waits


@pytest.mark.parametrize("what, options, words", [  # and in test_stage_threads.py
    ("calling_third", {"chunks": 2}, "a layer of chunk 1 of stage 0 calls '0', which chunk 0 of stage 0 has"),
    ("set", {}, "a value of type set passes between stages"),
    ("local", {}, "InvalidArgumentError: a value of type Local passes between stages"),
    ("grows", {}, "another one of a batch of these shapes"),
    # The memory that all micro-batches keep that a stage holds at once is planned for before the first one is computed.
    ("wide", {"pipeline": "gpipe", "micro_batches": 12, "rows": 12 * 4096}, "that other calls keep for backward"),
    ("wide", {"pipeline": "1f1b", "micro_batches": 12, "rows": 12 * 4096}, "a call is computed"),
])  # fmt: skip
def test_an_error_within_a_step_is_told_to_all_ranks(what, options, words):
    with Pool(2, "over_pipelines") as ranks:  # which an error ends
        for text in ranks.call("refused", what=what, **options):
            assert words in text, text


FAILS = """
import gc, json, os, signal, time
import torch
from torch import nn
from support import fake_gpu
import sluice, sluice.torch
RANK, HOW, given = int(os.environ["RANK"]), os.environ["HOW"], json.loads(os.environ["GIVEN"])
torch.set_num_threads(1)
if "device" in given:
    fake_gpu.share_memory(devices=2)
    given |= {"device_memory": "512MiB", "device_facts": fake_gpu.FACTS}

class Ends(nn.Linear):
    calls = 0
    def forward(self, x):
        Ends.calls += 1
        if RANK == 1 and Ends.calls == 8:
            if HOW == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the data of this rank is bad")
        return super().forward(x)

pipe = sluice.torch.Pipeline([Ends(8, 8) for _ in range(3)], sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=3, **given)
x = torch.ones(6, 8)
began = time.monotonic()
try:
    for step in range(100):
        pipe.train_step((x, x), nn.functional.mse_loss)
except (sluice.Error, ValueError) as error:
    told = [type(error).__name__, str(error), time.monotonic() - began]
    error.__traceback__ = None
pipe.close(values=False)
del pipe
gc.collect()
print(json.dumps([*told, [fake_gpu.alive(), fake_gpu.take_misuses()] if "device" in given else [[], []]]))
"""
GPU = {"device": "cuda"}


@pytest.mark.parametrize("size, how, given", [
    (3, "killed", {}), (4, "killed", {"mesh": "data=2,pipeline=2"}), (2, "killed", GPU), (2, "raises", GPU),
])  # fmt: skip
def test_others_end_with_an_error_that_names_the_rank_that_failed(size, how, given):
    if given == GPU:
        fake_gpu.require_built()
    for rank, (status, output, errors) in enumerate(run_program(FAILS, size, LIMIT, HOW=how, GIVEN=json.dumps(given))):
        if rank == 1 and how == "killed":
            assert status == -signal.SIGKILL
            continue
        assert status == 0, errors
        kind, text, seconds, left = json.loads(output.splitlines()[-1])
        assert seconds < LIMIT / 6 and left == [[], []]
        assert (kind == "ValueError") if rank == 1 else ("rank 1" in text), text


APART = """
import os, time
import torch
from torch import nn
torch.set_num_threads(1)
import sluice, sluice.torch
pipe = sluice.torch.Pipeline([nn.Linear(8, 8) for _ in range(3)], sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=3, patience=2.0)
x = torch.ones(6, 8)
pipe.forward_backward((x, x), nn.functional.mse_loss)
try:
    if os.environ["RANK"] == "1":
        pipe.clip_grad_norm_(1.0)
    pipe.optimizer.step()
except sluice.Error as error:
    print(error)
"""


def test_ranks_in_different_calls_do_not_wait_for_ever():
    for status, output, errors in run_program(APART, 3, LIMIT):
        assert status == 0 and "has not come to" in output, (output, errors)
