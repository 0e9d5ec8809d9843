"""Pipelines whose stages are threads of one process (Pipeline(devices=...)), on fake GPUs: the bits of one rank that wraps the whole model,
what users have of the model, and what is refused or fails. What stages do as processes is in test_pipeline.py and test_gpu_pipeline.py."""

import pytest
from support import fake_gpu
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.rank_pool import LIMIT, Pool

LONG = pytest.mark.long  # others show as much


@pytest.fixture(scope="module")
def process():
    fake_gpu.require_built()
    with Pool(1, "over_threads") as ranks:
        yield lambda function, **given: ranks.call(function, **given)[0]


def bits(found):
    return {key: found[key] for key in ("losses", "norms", "values")}


# ---- twins ----

# The GPUs of the stages, the model, how it is trained, and what is given to the pipeline alone.
TABLE = [
    ([0, 1], "layers", {"micro_batches": 4, "clip": 0.5}, {"place": "device"}),
    ([0, 1, 2], "layers", {"micro_batches": 4, "clip": 0.5, "update": "SGD"}, {"pipeline": "gpipe", "place": "disk"}),
    ([0, 1, 2], "layers", {"micro_batches": 2, "meta": True}, {"place": "memory"}),
    ([0, 1], "channels_last", {"micro_batches": 3, "state": "8bit"}, {"place": "memory"}),
    ([0, 1, 2, 3], "nested", {"micro_batches": 4, "clip": 0.5}, {"place": "device"}),
    ([0, 1], "counting", {"micro_batches": 4}, {"place": "memory", "updates": "cpu"}),
    ([0, 1, 2], "tied", {"micro_batches": 6, "clip": 0.5, "dtype": "bfloat16"}, {"place": "device"}),
    ([0, 1], "tied", {"micro_batches": 2, "meta": True, "steps": 1}, {"place": "disk"}),
    ([1, 0, 2], "llama", {"micro_batches": 3, "dtype": "bfloat16", "master": "none"}, {"recompute": True, "place": "memory"}),
    ([0, 1, 2], "llama", {"micro_batches": 2, "meta": True, "steps": 1}, {"place": "device"}),
    ([0, 1], "gpt2", {"micro_batches": 2, "update": "Muon"}, {"place": "disk"}),
    ([0, 1, 2], "gpt2", {"micro_batches": 4, "clip": 0.5}, {"pipeline": "zb-h1", "place": "memory"}),
    ([0, 1, 2], "hooked", {"micro_batches": 3, "clip": 0.5, "update": "SGD"}, {"place": "memory"}),
    ([0, 0], "layers", {"micro_batches": 4}, {"place": "memory"}),  # one GPU for both
    ([0, 1, 2], "deep", {"micro_batches": 4, "clip": 0.5}, {"chunks": 2, "place": "device"}),
    ([0, 1], "deep_tied", {"micro_batches": 6}, {"chunks": 2, "pipeline": "gpipe", "place": "disk"}),
    ([0], "layers", {"micro_batches": 2, "clip": 0.5}, {"place": "memory"}),
    ([0, 1], "recurrent", {"micro_batches": 2}, {"place": "memory"}),
]  # fmt: skip
MORE = [([0, 1], name, {"micro_batches": 2, "clip": 0.5, "steps": 2}, {"place": "device"}) for name in (
    "bloom", "opt", "gemma", "experts", "BLOOM", "DeepSeek V3", "Falcon", "Gemma 2", "GPT-J", "GPT-NeoX", "Llama with LoRA", "Mixtral", "Phi", "Qwen3")]  # fmt: skip


def name_of(row):
    gpus, name, given, of_pipeline = row
    return ", ".join([f"{gpus} {name}", *(f"{key}={value}" for key, value in (given | of_pipeline).items())])


@pytest.mark.parametrize("number, row", [
    *(pytest.param(number, row, id=name_of(row)) for number, row in enumerate(TABLE)),
    *(pytest.param(number, row, id=name_of(row), marks=LONG) for number, row in enumerate(MORE)),
])  # fmt: skip
def test_stages_of_one_process_have_the_bits_of_the_whole_model(process, number, row):
    gpus, name, given, of_pipeline = row
    given = {"name": name, "steps": 2} | given
    expected = process("whole", **given)
    schedule = fake_gpu.SCHEDULES[number % 3]
    found = process("in_one_process", called="piped", gpus=gpus, seed=number, schedule=schedule, **given | of_pipeline)
    assert bits(found) == expected
    plans = [found["plan"], *found["plans_of_others"]]
    assert [(gpu, stage, tiers) for gpu, stage, *tiers in plans] == [(gpu, 0, [of_pipeline["place"]]) for gpu in gpus]


# Functions of support.over_pipelines, with the results that test_pipeline.py finds.
@pytest.mark.parametrize("called, given, expected", [
    ("evaluated", {"name": "tied", "reserve": "64MiB"}, [True] * 7), ("evaluated", {"name": "layers", "chunks": 1}, [True] * 6), ("shapes", {}, [True] * 6),
    ("thawed", {}, [True] * 6), ("thawed", {"frozen": "01"}, [True] * 6), ("closed", {}, []),
])  # fmt: skip
def test_they_do_what_stages_in_processes_do(process, called, given, expected):
    assert process("in_one_process", called=called, **given) == expected


def test_gradients_that_are_not_finite_are_refused(process):
    text, same, changed, loss = process("in_one_process", called="not_finite")
    assert "not finite" in text and same and changed and loss > 0


def test_values_come_from_files(process, tmp_path):
    assert process("in_one_process", called="from_weights", folder=str(tmp_path), gpus=[0, 1]) == [39, True]


@pytest.mark.parametrize("name, chunks", [("layers", 1), ("tied", 1), pytest.param("deep_tied", 2, marks=LONG)])
def test_checkpoints_are_those_of_one_rank_and_both_go_on(process, tmp_path, name, chunks):
    given, of_pipeline = {"name": name, "micro_batches": 4, "scheduled": False}, {"called": "piped", "chunks": chunks, "place": "memory"}
    expected = process("whole", steps=2, **given)
    process("in_one_process", save=str(tmp_path / "threads"), steps=1, **of_pipeline, **given)
    process("whole", save=str(tmp_path / "one"), steps=1, **given)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*/*")}
    assert len(files) > 4 and {path.name: path.read_bytes() for path in (tmp_path / "threads").glob("*/*")} == files
    rest = given | {"load": str(tmp_path / "threads"), "first": 1, "steps": 1}
    for found in (process("whole", **rest), process("in_one_process", gpus=[0, 1, 2], **of_pipeline | {"chunks": 1}, **rest)):
        assert found["values"] == expected["values"] and found["losses"] == expected["losses"][1:]


# ---- what users have ----


def test_the_optimizer_has_the_state_of_all_stages(process):
    count, same, rates, same_loss, same_values, text = process("in_one_process", called="states", place="memory")
    assert count > 100 and same and rates == [1e-3, 1e-2] and same_loss and same_values
    assert "the state_dict has state of parameter 1000" in text


def test_the_model_stays_whole(process):
    found = process("in_one_process", called="kept")
    assert found["modules"] and found["parameters"] and found["values"] and found["names"] and found["places"] == [True, True]
    assert found["hooks"] == 2 and found["hooks_after"] == 1  # of two micro-batches, on the first stage; and of a call afterwards
    words = ["a model is called whose layers are the stages", "give one of its `modules`", "save() of the Pipeline", "call clip_grad_norm_() of the Pipeline", "is to be moved to"]
    for word, text in zip(words, found["refused"], strict=True):
        assert text is not None and word in text, text
    assert found["closed"] == [True, True, []] and "the Pipeline was closed" in found["after"]


def test_stages_have_the_modes_of_the_caller(process):
    plain, cast, eval_, inference = [True, True, False, False], [True, True, False, True], [False, False, False, False], [False, False, True, False]
    assert process("in_one_process", called="modes") == [[[plain, cast, eval_, inference]] * 2, [False, False]]


def test_blocks_may_be_compiled(process):
    plain, *of_compiled = process("in_one_process", called="compiled")
    assert of_compiled == [plain, plain] and plain[0] > plain[1] > 0


def test_random_numbers_do_not_depend_on_which_stage_comes_first(process):
    assert process("in_one_process", called="drawn", gpus=[0, 1, 2]) == [True, True, [True, True]]


def test_budgets_are_divided(process, tmp_path):
    of_memory, of_disk = process("in_one_process", called="budgets", folder=str(tmp_path), gpus=[0, 1, 2])
    assert of_disk == [21, 21, 21] and all(395 < each < 405 for each in of_memory), of_memory


def test_a_pipeline_that_is_dropped_leaves_nothing(process):
    assert process("in_one_process", called="dropped") == [True, [], 0]


# ---- what is refused, and what fails ----


@pytest.mark.parametrize("devices, options, words", [
    (["cuda:0", "cuda:7"], {}, "devices has 'cuda:7', and this process sees 2 GPUs"),
    (["cuda:0", "cuda"], {}, "it is a list of the GPUs of the stages by their numbers"),
    (["cpu", "cpu"], {}, "On the CPU stages of one process would not be faster than one"),
    (["cpu", "cpu"], {"device_memory": None, "device_facts": None}, "On the CPU stages of one process would not be faster than one"),
    (["cuda:0", "gpu:1"], {}, "it is a list of the GPUs"), ([], {}, "it is a list of the GPUs"), ("cuda:0", {}, "it is a list of the GPUs"),
    (["cuda:0", "cuda:1"] * 3, {}, "a pipeline of 6 stages is asked for, and the model has 4 blocks"),
    (["cuda:0", "cuda:1"], {"mesh": "pipeline=2"}, "mesh is 'pipeline=2', and devices is given"),
    (["cuda:0", "cuda:1"], {"device": "cuda"}, "device is 'cuda', and devices is given"),
    (["cuda:0", "cuda:1"], {"device_memory": None, "device_facts": None}, "device_memory is None, and the model has"),
    (["cuda:0", "cuda:1"], {"memory": "64MiB"}, "which share the memory of this process: each may have 64 MiB"),
    (["cuda:0", "cuda:1"], {"chunks": 3}, "a pipeline of 2 stages of 3 chunks each is asked for, and the model has 4 blocks"),
    (["cuda:0", "cuda:1"], {"model": "nested", "stages": "0-3"}, "the cut '0-3' has 1 groups of blocks, and there are 2 stages"),
])  # fmt: skip
def test_what_cannot_be_is_refused(process, devices, options, words):
    text = process("in_one_process", called="on_devices", **{"devices": devices} | options)
    assert text is not None and words in text, text


@pytest.mark.parametrize("what, words", [
    ("calling", "a layer of stage 1 calls one that stage 0 has"), ("set", "a value of type set passes between stages"),
    ("shifts", "is called with other values than the batch's input_ids"), ("fails", "mat1 and mat2 shapes cannot be multiplied"),
    ("frozen", "stage 1 has the blocks 1 to 1, and no parameter that is trained"), ("shared", "is the same tensor as '0.weight' of stage 0"),
])  # fmt: skip
def test_an_error_of_a_stage_is_raised(process, what, words):
    text = process("in_one_process", called="refused", what=what)
    assert text is not None and words in text, text


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_of_one_stage_ends_all_and_leaves_nothing(process, stage):
    texts, seconds, alive = process("in_one_process", called="fails", stage=stage, gpus=[0, 1, 2])
    assert texts[:2] == [None, None] and texts[2] == "ValueError: the data of this layer are bad"
    assert f"rank {stage}" in texts[3] and "the data of this layer are bad" in texts[3], texts[3]
    assert seconds < LIMIT / 8 and alive == []


@pytest.mark.parametrize("stage", [0, 1])
def test_a_lack_of_memory_is_told_of_the_gpu_that_has_it(process, stage):
    text = process("in_one_process", called="lacks", stage=stage)
    assert text.startswith("OutOfMemoryError: PyTorch has no room for the backward pass") and f"Of the memory of GPU {stage} it may take" in text, text


def test_hooks_and_values_of_the_model_stay_the_users(process):
    (with_hook, without), loaded, text, same, same_again = process("in_one_process", called="lives_on")
    assert with_hook == 2 and without == 0  # a call for each micro-batch
    assert loaded and "shapes cannot be multiplied" in text and same and same_again


def test_who_is_called_in_a_step_cannot_call_the_pipeline(process):
    texts = process("in_one_process", called="within")
    assert len(texts) == 2 and all("by a layer or loss_fn that it calls" in text for text in texts), texts


def test_an_error_outside_of_a_step_does_not_let_the_others_wait(process, tmp_path):
    text, seconds = process("in_one_process", called="saved_apart", folder=str(tmp_path))
    assert text == "there is no room" and seconds < 20


def test_where_it_cannot_be_made_the_model_is_as_it_was(process):
    texts, same, trains = process("in_one_process", called="undone")
    for words, text in zip(("BudgetError", "BudgetError", "has 1 groups of blocks", "state is 'none'", "there is no such rule"), texts, strict=True):
        assert text is not None and words in text, text
    assert same and trains


def test_after_ctrl_c_the_step_ends_and_training_goes_on(process):
    expected, *found = (process("in_one_process", called="interrupted", times=times) for times in (0, 1, 2))
    assert found == 2 * [[expected[0], "interrupted", *expected[2:]]] and len(set(expected)) == 4


def test_ctrl_c_while_it_is_made_leaves_the_model_plain(process):
    assert process("in_one_process", called="interrupted_at_first") == [[False] * 4, [[], 0], True]
