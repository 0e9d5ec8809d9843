"""Pipelines whose stages compute on GPUs, each on a fake one of its own: the bits of stages that compute on the CPU, wherever everything
is, and errors that all ranks have. What the stages on the CPU do is in test_pipeline.py."""

import os
import re
import threading

import pytest
import torch
from support import fake_gpu
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.rank_pool import Pool
from test_pipeline import MESHES, merged

import sluice
import sluice.torch
from sluice.ranks import Ranks, shared_memory
from sluice.torch._borders import Border

DATA = "data=2,pipeline=2"
LONG = pytest.mark.long  # others show as much


# ---- the bits of stages on the CPU ----

# The number of ranks, the model, and how it is cut and trained; and then what is given on GPUs alone: mostly where everything is.
TABLE = [
    (2, "layers", {"micro_batches": 4, "clip": 0.5}, {"place": "device"}),
    (2, "channels_last", {"micro_batches": 3, "state": "8bit"}, {"place": "memory"}),
    (3, "tied", {"micro_batches": 6, "clip": 0.5, "dtype": "bfloat16"}, {"place": "device"}),
    (2, "gpt2", {"micro_batches": 4, "clip": 0.5, "pipeline": "zb-h1"}, {"place": "memory"}),
    (3, "llama", {"micro_batches": 3, "recompute": True, "links": "gloo", "dtype": "bfloat16", "master": "none", "steps": 1}, {"place": "memory"}),
    (2, "tied", {"micro_batches": 2, "meta": True, "steps": 1}, {"place": "device"}),
    (2, "layers", {"micro_batches": 4}, {"place": "memory", "device": "cuda:0", "device_memory": "400MiB"}),  # one GPU for both
    (4, "broad", {"micro_batches": 3, "clip": 0.5, "dtype": "bfloat16", "stage": 3, "pipeline": "gpipe"}, {"place": "memory"}),
    (4, "broad_tied", {"micro_batches": 3, "clip": 0.5, "stage": 3}, {"place": "memory"}),
    (3, "deep", {"micro_batches": 4, "clip": 0.5, "chunks": 2}, {"place": "device"}),
    (3, "deep_llama", {"micro_batches": 6, "chunks": 2, "recompute": True, "steps": 1}, {"place": "disk"}),
    (2, "llama", {"micro_batches": 3, "recompute": True, "units": None}, {"place": "memory"}),
    (4, "broad", {"micro_batches": 3, "clip": 0.5, "chunks": 2, "stage": 3}, {"place": "memory"}),
    (4, "broad", {"micro_batches": 3, "clip": 0.5, "stage": 1}, {"place": "device", "gpu_links": "nccl"}),
]  # fmt: skip
MORE = [
    (2, "tied", {"micro_batches": 3, "pipeline": "gpipe", "state": "8bit"}, {"place": "disk"}),
    (2, "counting", {"micro_batches": 4}, {"place": "memory", "updates": "cpu"}),
    (4, "experts", {"micro_batches": 1, "clip": 0.5, "stage": 3}, {"place": "disk"}),
    (3, "nested", {"micro_batches": 4, "clip": 0.5}, {"place": "device"}),
    (4, "broad", {"micro_batches": 2, "update": "SGD", "stage": 3}, {"place": "device"}),
    (3, "hooked", {"micro_batches": 3, "update": "SGD"}, {"place": "memory"}),
    (2, "gpt2", {"micro_batches": 2, "update": "Muon"}, {"place": "disk"}),
    (2, "opt", {"micro_batches": 2}, {"place": "memory"}),
    (3, "bloom", {"micro_batches": 2}, {"place": "device"}),
    (3, "gemma", {"micro_batches": 2, "dtype": "bfloat16"}, {"place": "device"}),
    *((2, name, {"micro_batches": 4, "clip": 0.5, "pipeline": pipeline, "chunks": 2, **kind}, {"place": place})
      for name in ("deep", "deep_gpt2", "deep_llama", "deep_tied") for pipeline in ("1f1b", "gpipe") for place in ("device", "disk")
      for kind in ({}, {"state": "8bit"})),
    *((size, name, {"micro_batches": 3, "clip": 0.5, "pipeline": pipeline, **kind}, {"place": place})
      for size in (2, 3) for name in ("layers", "tied") for pipeline in ("1f1b", "gpipe") for place in ("device", "memory", "disk")
      for kind in ({}, {"state": "8bit"}, {"update": "SGD"}, {"dtype": "bfloat16"})),
    *((4, name, {"micro_batches": 3, "clip": 0.5, "stage": stage, **kind}, {"place": place})
      for name in ("broad", "tied") for stage in (0, 1, 3) for place in ("device", "memory", "disk") for kind in ({}, {"state": "8bit"})),
]  # fmt: skip


def tiers_of(name, given, on_gpu, stage):
    """Where parameters, gradients and state of a stage are. With stage=3 each rank has shards of the parameters of two layers of "broad", and
    of the table of "broad_tied"."""
    has_shards = given.get("stage") == 3 and (name == "broad" or (name, stage) == ("broad_tied", 1))
    return sorted({on_gpu["place"]} | ({"ranks"} if has_shards else set()))


def name_of(row):
    size, name, given, on_gpu = row
    return ", ".join([f"{size} {name}", *(f"{key}={value}" for key, value in (given | on_gpu).items())])


@pytest.mark.parametrize("number, row", [
    *(pytest.param(number, row, id=name_of(row)) for number, row in enumerate(TABLE)),
    *(pytest.param(number, row, id=name_of(row), marks=LONG) for number, row in enumerate(MORE)),
])  # fmt: skip
def test_stages_on_gpus_have_the_bits_of_stages_on_the_cpu(pipelines, number, row):
    size, name, given, on_gpu = row
    given, places = {"name": name, "steps": 2} | given, None
    if size == 4:
        mesh = list(MESHES)[number % 2]
        given, places = given | {"mesh": mesh}, MESHES[mesh]
    expected = pipelines[size].call("piped", **given)
    found = pipelines[size].call("on_gpus", called="piped", seed=number, schedule=fake_gpu.SCHEDULES[number % 3], **given | on_gpu)
    for rank, (there, here) in enumerate(zip(expected, found, strict=True)):
        gpu = 0 if on_gpu.get("device") == "cuda:0" else rank
        assert there["plan"][:2] == [None, given.get("stage", 0)]
        assert here["plan"] == [gpu, given.get("stage", 0), *tiers_of(name, given, on_gpu, here["place"][1])]
    assert merged(found, places) == merged(expected, places)


# Functions of support.over_pipelines, with the results that test_pipeline.py finds.
CALLED = [
    (4, "shapes", {"mesh": DATA}), (2, "thawed", {}), (2, "evaluated", {"name": "tied", "chunks": 2, "reserve": "64MiB"}),
    (4, "not_finite", {"mesh": DATA}), (2, "misused", {}), pytest.param(4, "misused", {"mesh": DATA, "stage": 3}, marks=LONG),
]  # fmt: skip


@pytest.mark.parametrize("size, called, given", CALLED)
def test_stages_on_gpus_do_what_stages_on_the_cpu_do(pipelines, size, called, given):
    schedule = fake_gpu.SCHEDULES[len(called) % 3]
    assert pipelines[size].call("on_gpus", called=called, schedule=schedule, **given) == pipelines[size].call(called, **given)


def test_values_come_from_files_to_each_stage(pipelines, tmp_path):
    (first, same), (second, same_there) = pipelines[2].call("on_gpus", called="from_weights", folder=str(tmp_path))
    assert same and same_there and first + second == 39


def test_a_pipeline_that_was_closed_has_nothing_on_its_gpu(pipelines):
    assert pipelines[2].call("on_gpus", called="closed") == [[], []]


@pytest.mark.parametrize("size, name, given", [
    (4, "broad", {"mesh": DATA, "stage": 3}), pytest.param(2, "tied", {"state": "8bit"}, marks=LONG),
])  # fmt: skip
def test_a_run_goes_on_on_gpus_and_on_the_cpu_from_what_either_has_saved(pipelines, tmp_path, size, name, given):
    pool, given = pipelines[size], {"name": name, "micro_batches": 2, "scheduled": False, **given}
    places = MESHES[DATA] if size == 4 else None
    ways = {"cpu": {}, "gpu": {"called": "piped", "place": "memory"}}

    def run(way, **more):
        return merged(pool.call("on_gpus" if ways[way] else "piped", **ways[way] | given | more), places)

    files = {}
    for way in ways:
        run(way, save=str(tmp_path / way), steps=1)
        files[way] = {path.name: path.read_bytes() for path in (tmp_path / way).glob("*/*")}
    assert len(files["cpu"]) > 4 and files["gpu"] == files["cpu"]
    whole = run("cpu", steps=2)
    for saved, goes_on in (("cpu", "gpu"), ("gpu", "cpu")):
        found = run(goes_on, load=str(tmp_path / saved), first=1, steps=1)
        assert found["values"] == whole["values"] and found["losses"] == whole["losses"][1:]


# ---- what is refused ----

NO_GPU = {"device": None, "device_memory": None, "device_facts": None}


@pytest.mark.parametrize("what, options, words", [
    ("linears", {"device_memory": None, "device_facts": None}, "InvalidArgumentError: device is 'cuda', device_memory is None"),
    ("linears", {"of_ranks": [{}, NO_GPU]}, 'InvalidArgumentError: what computes is "the CPU" on rank 1, and "a GPU" on rank 0'),
    ("linears", {"of_ranks": [NO_GPU, {}]}, 'InvalidArgumentError: what computes is "a GPU" on rank 1, and "the CPU" on rank 0'),
    ("linears", {"devices": 1, "device_facts": None}, "InvalidArgumentError: ranks 0, 1 of one host are on one GPU"),
    ("linears", {"batch_on": "meta"}, "InvalidArgumentError: the batch has a tensor on meta; give it on the CPU"),
    ("linears", {"device_memory": "8MiB"}, "BudgetError"),
    ("linears", {"reproducible": True}, "InvalidArgumentError: device memory is given to a reproducible run"),
    ("tied", {}, "InvalidArgumentError: the batch has no input_ids"),
])  # fmt: skip
def test_what_cannot_be_is_refused_on_all_ranks(pipelines, what, options, words):
    for text in pipelines[2].call("on_gpus", called="refused", what=what, **options):
        assert text is not None and re.match(words, text.removeprefix("StateError: rank 1 has an error, so that no rank goes on: ")), text


def test_an_error_within_a_step_is_told_to_all_ranks():
    with Pool(2, "over_pipelines") as ranks:  # which an error ends
        for text in ranks.call("on_gpus", called="refused", what="meta"):
            assert "a tensor that is torch.strided and on meta passes" in text, text


# ---- tensors of a GPU, which messages cannot read ----

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU."""


class Stands(torch.overrides.TorchFunctionMode):
    """Lets them be on a GPU for this thread, of which copies to the host are waited for."""

    registered = 0  # how often memory of the host was made that is registered

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__ and isinstance(args[0], OnGpu):
            return GPU
        assert not (func in (torch.Tensor.data_ptr, torch.Tensor.numpy) and isinstance(args[0], OnGpu)), "the host reads a GPU's address"
        if func is torch.empty_strided:
            self.registered += kwargs.pop("pin_memory", False)
        if func is torch.Tensor.to and args[1] == GPU:
            return args[0].clone().as_subclass(OnGpu)
        if func in (torch.Tensor.copy_, torch.Tensor.cpu) and isinstance(args[-1], OnGpu):
            assert not kwargs.get("non_blocking"), "nothing waits for the copy"
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].copy_(args[1]) if len(args) > 1 else args[0].as_subclass(torch.Tensor)
        return func(*args, **kwargs)


def test_a_batch_is_on_the_cpu_or_on_the_gpu():
    pipe = sluice.torch.Pipeline([torch.nn.Linear(2, 2)], sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2, ranks=False)
    x = torch.arange(8.0).view(4, 2)
    with Stands():
        pipe._device = GPU
        for batch in ((x, x), (x.clone().as_subclass(OnGpu), x)):
            parts, rows, _ = pipe._cut(batch, lambda output, targets: output, True)
            pipe._check_alike(batch, rows)
            assert isinstance(pipe._here(parts[1][0]), OnGpu) and pipe._here(parts[1])[0].tolist() == [[4, 5], [6, 7]]
        with pytest.raises(sluice.InvalidArgumentError, match="a tensor on meta; give it on the CPU, or on cuda:0, where this stage"):
            pipe._cut((x.to("meta"), x), lambda output, targets: output, True)
    pipe.close()


def test_what_passes_a_border_goes_through_memory_of_the_host():
    descriptor, found = shared_memory(2), [None, None]
    x = torch.arange(6.0).view(3, 2)

    def first(border):
        on_gpu = x.t().clone().as_subclass(OnGpu).requires_grad_()
        border.send(0, {"x": on_gpu * 1, "seen": torch.arange(3).as_subclass(OnGpu), "ids": torch.arange(4), "count": 7})
        found[0] = border.gradients(0)
        border.end()

    def second(border):
        border.begin_value(0)
        came = {}
        value = border.value(0, came.__setitem__)
        (value["x"] * value["x"]).sum().backward()
        border.send_gradients(0, came)
        border.end()
        found[1] = value

    def run(rank, part):
        with Stands() as stands:
            part(Border(Ranks.local(descriptor, rank), 1 - rank, None, GPU))
            assert stands.registered == 3
            done.append(rank)

    done = []
    threads = [threading.Thread(target=run, args=args) for args in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    os.close(descriptor)
    assert sorted(done) == [0, 1]
    (gradient,), value = found
    assert [isinstance(t, OnGpu) for t in (gradient, value["x"], value["seen"], value["ids"])] == [True, True, True, False]
    assert torch.equal(gradient.as_subclass(torch.Tensor), 2 * x.t()) and torch.equal(value["x"].as_subclass(torch.Tensor), x.t())
    assert value["seen"].tolist() == [0, 1, 2] and value["ids"].tolist() == [0, 1, 2, 3] and value["count"] == 7
