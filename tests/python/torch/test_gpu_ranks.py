"""Ranks that compute on GPUs, each on a fake one of its own: the bits of ranks that compute on the CPU, wherever everything is."""

import ctypes
import json
import os
import re
import threading

import pytest
import torch
from support import fake_gpu, rank_pool
from support import sluice_package  # noqa: F401: skips where the library is not built

from sluice.ranks import Ranks, shared_memory
from sluice.torch._gpu import Gpu
from sluice.torch._together import Together

STAGES = [0, 1, 3]  # those that ranks on GPUs have
LONG = pytest.mark.long  # others show as much


@pytest.fixture
def pool(pools):
    return pools[2]


def alike(results):
    """The results, of which the bits are all ranks'."""
    assert len({(each["digest"], tuple(each["norms"]), each["scale"]) for each in results}) == 1
    return results


# ---- the bits of CPU ranks ----

# The model, how it is trained, and what is given on GPUs alone. Each is run at one stage, in one place after another.
TABLE = [
    ("gpt2", {"accumulate": 4, "stated": True, "clip": 0.1, "infinite": 1}, {}),
    ("llama", {"dtype": "bfloat16", "stated": True, "recompute": True, "state": "8bit"}, {}),
    ("experts", {"accumulate": 4, "stated": True, "to_none": False}, {"updates": "cpu"}),
    ("mixtral", {"clip": 0.1}, {"updates": "gpu"}),
    ("convolutional", {"accumulate": 4, "update": "SGD"}, {}),
    ("gpt2", {"stated": True, "update": "Adafactor"}, {}),
    ("gpt2", {"stated": True, "update_in_backward": True, "clip_value": 0.001}, {}),
    ("wide in half", {"stated": True, "update_in_backward": True, "dtype": "bfloat16"}, {"updates": "gpu"}),
    ("llama", {"dtype": "bfloat16", "master": "none", "accumulate": 4, "alone": "evaluate"}, {"updates": "cpu"}),
]  # fmt: skip
MORE = [
    *(("gpt2", {"update": update, "state": state, "stated": True, "clip": 0.1}, {"updates": by})
      for update in ("AdamW", "Lion", "Adam") for state in ("f32", "bf16", "8bit") for by in ("cpu", "gpu")),
    *(("gpt2", {"update": "SGD"}, {"updates": by}) for by in ("cpu", "gpu")),
    *((name, {"accumulate": 4, "stated": stated, "clip": 0.1}, {}) for name in ("llama", "mixtral", "experts", "convolutional") for stated in (False, True)),
    *(("gpt2", {"stated": True, "update_in_backward": True, "update": update}, {}) for update in ("AdamW", "SGD", "Adafactor", "Muon")),
    *((name, {"dtype": "bfloat16", "stated": True}, {"updates": by}) for name in ("wide in half", "mixtral") for by in ("cpu", "gpu")),
    ("gpt2", {"update": "Muon", "accumulate": 4}, {}),
    ("gpt2", {"accumulate": 4, "clip": 0.1}, {}),
    ("wide", {"accumulate": 4, "stated": True, "clip": 0.1}, {}),
    ("gpt2", {"alone": "save"}, {}),
    ("llama", {"stated": True, "clip": 0.1}, {"compiled": True}),
    ("gpt2", {"links": "gloo", "stated": True}, {}),
]  # fmt: skip
PLACES = ("device", "memory", "disk")


def check_twins(pool, name, settings, on_gpus, stages_and_places, first=0):
    settings = {"name": name, "steps": 2} | settings
    expected = alike(pool.call("train", stage=0, **settings))
    by_cpu = on_gpus.get("updates") == "cpu" or settings.get("update") in ("Adafactor", "Muon")
    for seed, (stage, place) in enumerate(stages_and_places, first):
        by_gpus = on_gpus.get("updates") == "gpu" and stage == 3  # a GPU updates shards in its own memory alone, where other GPUs must read them
        has_peers = seed % 2 == 0 or by_gpus
        of_parts = {"parameters": "device", "state": "memory"}  # what the CPU updates is no state of the GPU
        on_cpus = by_cpu or (stage == 3 and not has_peers)
        of_disk = {"gradients": "disk", "state": "disk"}
        wanted = of_disk if by_gpus and place == "disk" else of_parts if on_cpus and place == "device" else place
        given = settings | on_gpus | {"stage": stage, "place": wanted, "has_peers": has_peers}
        found = pool.call("on_gpus", called="train", seed=seed, schedule=fake_gpu.SCHEDULES[seed % 3], **given)
        assert found == expected, f"stage {stage}, {place}, seed {seed}"


def name_of(row):
    return ", ".join([row[0], *(f"{name}={value}" for name, value in (row[1] | row[2]).items())])


@pytest.mark.parametrize("number, row", [
    *(pytest.param(number, row, id=name_of(row)) for number, row in enumerate(TABLE)),
    *(pytest.param(number, row, id=name_of(row), marks=LONG) for number, row in enumerate(MORE)),
])  # fmt: skip
def test_ranks_on_gpus_have_the_bits_of_ranks_on_the_cpu(pool, number, row):
    check_twins(pool, *row, [((0, 3, 1, 3)[number % 4], PLACES[number % 3])], number)


@LONG
@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_they_do_at_every_stage_and_in_every_place(pool, row):
    check_twins(pool, *row, [(stage, place) for stage in STAGES for place in PLACES])


def test_they_do_where_each_gpu_passes_on_its_shards(pool):
    rows = ("wide in half", {"alone": "evaluate", "dtype": "bfloat16"}), ("wide", {"stated": True, "update": "Adafactor", "clip": 0.1})
    for seed, (name, settings) in enumerate(rows):
        check_twins(pool, name, settings, {"updates": "cpu", "facts": True}, [(3, "memory")], 2 * seed)


def test_they_do_where_shards_of_parameters_are_on_disk(pool):
    in_8_bits = {"dtype": "bfloat16", "stated": True, "state": "8bit", "alone": "evaluate"}
    for seed, (name, settings) in enumerate((("llama", in_8_bits), ("wide", {"stated": True, "update": "Adafactor", "clip": 0.1}))):
        check_twins(pool, name, settings, {}, [(3, "disk")], seed)


@LONG
def test_they_do_where_blocks_are_compiled(pool):
    check_twins(pool, "llama", {"stated": True, "clip": 0.1}, {"compiled": True}, [(3, "memory")])


@pytest.mark.parametrize("size, stage, place, has_peers", [
    (4, 3, "memory", 2),
    *(pytest.param(size, stage, place, has_peers, marks=LONG) for size, stage, place, has_peers in (
        (3, 3, "device", True), (4, 3, "memory", False), (3, 3, "memory", False), (3, 1, "device", True), (3, 1, "memory", False),
        (4, 3, "device", True), (4, 1, "device", False), (4, 1, "memory", True),
    )),
])  # fmt: skip
def test_they_do_on_more_gpus_of_one_host(pools, size, stage, place, has_peers):
    settings = {"name": "wide", "accumulate": size, "stated": True, "clip": 0.5, "steps": 2}
    expected = alike(pools[size].call("train", **settings))
    given = {"stage": stage, "place": place, "has_peers": has_peers} | ({"updates": "gpu"} if place == "device" else {})
    assert pools[size].call("on_gpus", called="train", seed=stage, **given, **settings) == expected


NCCL = {"has_nccl": True, "gpu_links": "nccl"}


@pytest.mark.parametrize("name, stage, place, joined", [
    ("gpt2", 3, "memory", {}), ("gpt2", 0, "device", NCCL), ("wide", 3, "memory", NCCL),
    *(pytest.param(*row, marks=LONG) for row in (("wide", 3, "memory", {}), ("wide", 1, "memory", NCCL), ("wide", 1, "device", NCCL))),
])  # fmt: skip
def test_they_do_on_several_hosts(pools, name, stage, place, joined):
    settings = {"name": name, "accumulate": 4, "clip": 0.5, "steps": 2}
    expected = alike(pools[4].call("train", **settings))
    assert pools[4].call("on_gpus", called="train", seed=stage, links="hosts", stage=stage, place=place, **joined, **settings) == expected


def test_gpus_of_one_host_copy_shards_from_where_they_are(pool):
    """No message carries them, as one does between CPUs that share no memory."""
    for came, parameters in pool.call("on_gpus", called="received"):
        assert came < parameters / 20
    for came, parameters in pool.call("received", links="gloo"):
        assert came > parameters / 2


@pytest.mark.parametrize("has_peers, asked, links", [
    (True, [None, None], "gpus"), (False, [None, None], "host"), (True, ["host", None], "host"), (True, ["gpus", None], "gpus"),
])  # fmt: skip
def test_gpus_that_read_each_others_memory_join_ranks_unless_the_host_is_to(pool, has_peers, asked, links):
    assert pool.call("on_gpus", called="joined", has_peers=has_peers, of_ranks=asked) == 2 * [[links, links == "gpus"]]


@pytest.mark.parametrize("has_peers, asked, links", [(True, [None, None], "gpus"), (True, ["nccl", "nccl"], "nccl"), (False, ["nccl", None], "nccl")])
def test_nccl_joins_ranks_that_ask_for_it(pool, has_peers, asked, links):
    assert pool.call("on_gpus", called="joined", has_peers=has_peers, has_nccl=True, of_ranks=asked) == 2 * [[links, True]]


def test_the_faster_of_nccl_and_what_else_joins_ranks_is_used(pool):
    first, second = pool.call("on_gpus", called="joined", has_peers=False, has_nccl=True, of_ranks=[None, None])
    assert first == second and first in (["nccl", True], ["host", False])


def test_gpus_of_which_some_pairs_alone_read_each_others_memory_leave_it_to_the_host(pools):
    assert pools[4].call("on_gpus", called="joined", has_peers=2, of_ranks=4 * [None]) == 4 * [["host", False]]


def test_what_ranks_find_of_each_others_memory_is_measured_where_it_is_not_stated(pool):
    facts = {"device_facts": None, "of_ranks": ["gpus", "gpus"], "device_memory": "900MiB"}
    assert pool.call("on_gpus", called="joined", **facts) == 2 * [["gpus", True]]


def test_a_gpu_with_too_little_memory_for_what_others_read_leaves_it_to_the_host(pool):
    assert pool.call("on_gpus", called="links_of", device_memory="320MiB", reserve="32MiB") == 2 * ["host"]
    by_nccl = {"has_peers": False, "has_nccl": True}
    assert pool.call("on_gpus", called="links_of", device_memory="320MiB", reserve="32MiB", **by_nccl) == 2 * ["host"]
    assert pool.call("on_gpus", called="links_of", device_memory="640MiB", reserve="32MiB") == 2 * ["gpus"]


@pytest.mark.parametrize("has_peers, asked, says", [
    (False, ["gpus", None], ".*GPUs do not read each other's memory: rank [01]: .*PEER_ACCESS_UNSUPPORTED"),
    (True, ["gpus", "host"], ".*GPUs do not read each other's memory: rank 1: options.links is 'host'"),
    (False, ["nccl", None], ".*GPUs do not exchange by NCCL: rank 0: NCCL cannot be loaded: /nowhere"),
    (False, ["nccl", "host"], ".*GPUs do not exchange by NCCL: rank 1: options.links is 'host'"),
])  # fmt: skip
def test_links_that_are_not_there_are_refused_on_all_ranks(pool, has_peers, asked, says):
    first, second = pool.call("on_gpus", called="joined", has_peers=has_peers, of_ranks=asked)
    assert re.match(f"SystemIOError: options.links is '{asked[0]}'" + says, first), first
    assert re.match("StateError: .*rank 0|SystemIOError: rank 0" + says, second), second


KEPT = [
    ("gpt2", {"clip": 0.1}), ("gpt2", {"clip": 0.1, "infinite": 0}), ("llama", {"dtype": "bfloat16", "recompute": True, "state": "8bit"}),
    ("experts", {}), ("wide", {"clip": 0.1, "update": "Lion", "infinite": 0}), ("mixtral", {"clip": 0.1, "dtype": "bfloat16"}),
]  # fmt: skip


@pytest.mark.parametrize("number, row", [pytest.param(number, row, id=f"{row[0]}, {row[1]}") for number, row in enumerate(KEPT)])
def test_at_stages_2_and_3_a_rank_keeps_its_own_part_of_gradients(pool, number, row):
    """Each place has it with several models: where GPUs read each other's memory, and where they do not."""
    name, settings = row
    settings = {"name": name, "steps": 2, "stated": True} | settings
    expected = alike(pool.call("train", **settings))
    stage, by = ((2, None), (3, "gpu"), (2, None), (3, "cpu"))[number % 4]
    place = PLACES[number % 3]
    of_parts = {"state": "memory" if by == "cpu" and place == "device" else place}
    if (stage, by, place) != (3, "gpu", "disk"):  # GPUs update shards in their own memory
        of_parts["parameters"] = place
    given = settings | {"stage": stage, "place": of_parts, "updates": by, "has_peers": by == "gpu" or number % 4 == 0}
    assert pool.call("on_gpus", called="train", seed=number, schedule=fake_gpu.SCHEDULES[number // 2 % 3], **given) == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_rank_cannot_do_with_its_part_of_gradients_says_so(pool, stage):
    for texts in pool.call("on_gpus", called="with_parts_of_gradients", stage=stage):
        read, norm, again, stepped, of_full, closed = texts
        assert of_full > 0 and closed is None
        assert read.startswith("StateError: a gradient is read, and at stages 2 and 3 a rank keeps its own part"), read
        assert norm > 0 and stepped is None
        assert again.startswith("StateError: ") and "ask for stage 1" in again, again


@pytest.mark.parametrize("number, name, settings, given", [
    (0, "gpt2", {"accumulate": 4, "clip": 0.1, "infinite": 1}, {"stage": 2, "place": "device"}),
    (1, "llama", {"accumulate": 8, "dtype": "bfloat16", "state": "8bit"}, {"stage": 3, "place": "memory"}),
    (2, "experts", {"accumulate": 4, "update": "Adafactor"}, {"stage": 2, "place": "memory"}),
    pytest.param(3, "wide in half", {"accumulate": 6, "dtype": "bfloat16"}, {"stage": 3, "place": "disk", "updates": "cpu"}, marks=LONG),
])  # fmt: skip
def test_sums_in_each_backward_have_the_bits_of_ranks_on_the_cpu(pool, number, name, settings, given):
    settings = {"name": name, "steps": 2, "stated": True, "sum_gradients": "each_backward"} | settings
    expected = alike(pool.call("train", stage=3, **settings))
    schedule, has_peers = fake_gpu.SCHEDULES[number % 3], number % 2 == 0
    assert pool.call("on_gpus", called="train", seed=number, schedule=schedule, has_peers=has_peers, **given, **settings) == expected


@pytest.mark.parametrize("skips", [True, False])
def test_ranks_that_come_apart_with_parts_of_gradients_end_with_the_reason(pool, skips):
    for text in pool.call("on_gpus", called="apart", skips=skips):
        assert re.match("StateError: .*(are apart|was multiplied by|rank 1 has no gradient|rank [01] has an error)", str(text)), text


def test_values_differ_where_gradients_are_not_summed(pool):
    """The comparisons above tell a rank's own gradients from the mean."""
    assert pool.call("train", accumulate=4) != pool.call("train")


# ---- how they begin, what one does alone, and what is saved ----


def test_all_begin_with_the_values_of_rank_0(pool):
    expected = pool.call("on_gpus", called="train", steps=1)
    assert pool.call("on_gpus", called="train", seed_of_rank=True, steps=1) == expected == pool.call("train", steps=1)
    (first, second), cpu = pool.call("on_gpus", called="from_meta"), pool.call("from_meta")
    assert first["digest"] == second["digest"] == cpu[0]["digest"] and first["next"] != second["next"]


@pytest.mark.parametrize("what", ["save", pytest.param("evaluate", marks=LONG), pytest.param("generate", marks=LONG)])
def test_one_rank_alone(pool, what):
    found = pool.call("on_gpus", called="train", alone=what, stage=STAGES[-1], place="memory")
    assert found == pool.call("train")


def test_a_model_is_closed_on_all_ranks_or_on_none(pool):
    (text, found), (text_there, found_there) = pool.call("on_gpus", called="closed_without_room", stage=STAGES[-1])
    assert text.startswith("StateError: rank 1 has an error, so that no rank goes on: the values of the model do not fit")
    assert text_there.startswith("BudgetError: the values of the model do not fit as plain tensors")
    assert [found, found_there] == pool.call("train", name="normed")


@pytest.mark.parametrize("way, saves, stage, place", [
    ("engine", True, 3, "disk"), ("state_dict", False, 3, "memory"),
    *(pytest.param(*row, marks=LONG) for row in (
        ("engine", True, 3, "memory"), ("engine", False, 3, "disk"), ("state_dict", True, 1, "memory"), ("engine", False, 3, "memory"),
        ("engine", False, 0, "memory"),
    )),
])  # fmt: skip
def test_a_run_goes_on_on_gpus_and_on_the_cpu_from_what_either_has_saved(pool, tmp_path, way, saves, stage, place):
    found = []
    for gpus in ({}, {"stage": stage, "place": place, "saves_on_gpu": saves, "goes_on_on_gpu": not saves}):
        folder = tmp_path / f"{len(gpus)}"
        folder.mkdir()
        found.append(pool.call("go_on", folder=str(folder), way=way, **gpus))
    assert found[0] == found[1]


# ---- which GPU a rank has ----


def test_each_rank_has_the_gpu_of_its_place_on_the_machine(pool):
    assert pool.call("placed_on_gpus") == [[0, "0000:1b:00.0", False], [1, "0000:1c:00.0", False]]
    assert pool.call("placed_on_gpus", devices=3, of_ranks=[{"device": "cuda:2"}, {}]) == [[2, "0000:1d:00.0", False], [1, "0000:1c:00.0", False]]


def test_a_rank_without_a_gpu_is_told(pool):
    first, second = pool.call("placed_on_gpus", local_ranks=["0", "2"])
    assert first[1] and first[0].startswith("StateError: rank 1 has an error, so that no rank goes on: device is 'cuda', which is GPU 2")
    assert second[1] and second[0].startswith("InvalidArgumentError: device is 'cuda', which is GPU 2 on the rank with LOCAL_RANK=2, and this")

    first, second = pool.call("placed_on_gpus", of_ranks=[{}, {"device": "cuda:5"}])
    assert first[1] and first[0].startswith("NotFoundError: rank 1 could not make its engine: GPU 5 was asked for"), first
    assert second[1] and second[0].startswith("NotFoundError: GPU 5 was asked for"), second


SHARED = {"device": "cuda:0", "device_memory": "400MiB"}


@pytest.mark.parametrize("given, says", [
    ({"devices": 1, "device_facts": None}, r"InvalidArgumentError: ranks 0, 1 of one host are on one GPU \(0000:1b:00.0, 'fake GPU'\); .*LOCAL_RANK"),
    ({"device": "cuda:0", "device_facts": None}, r"InvalidArgumentError: ranks 0, 1 of one host are on one GPU \(0000:1b:00.0, .*device_facts"),
    ({"of_ranks": [{}, {"device": None, "device_memory": None, "device_facts": None}]},
     'InvalidArgumentError: what computes is "the CPU" on rank 1, and "a GPU" on rank 0; give all ranks the same'),
    ({"of_ranks": [{"device": None, "device_memory": None, "device_facts": None}, {}]}, 'InvalidArgumentError: what computes is "a GPU" on rank 1'),
    ({"kinds": ["one", "other"], "on_meta": True}, "InvalidArgumentError: the GPU on which first values are drawn,.* is 'other' on rank 1, and 'one'"),
])  # fmt: skip
def test_what_ranks_cannot_have_is_refused_on_all_of_them(pool, given, says):
    (text, same), (text_there, same_there) = pool.call("placed_on_gpus", **given)
    assert same and same_there and text == text_there
    assert re.match(says, text), text


def test_ranks_share_a_gpu_where_each_was_told_so(pool):
    assert pool.call("placed_on_gpus", **SHARED) == 2 * [[0, "0000:1b:00.0", True]]
    assert pool.call("on_gpus", called="train", **SHARED) == pool.call("train")


def test_gpus_may_be_of_different_kinds(pool):
    found = pool.call("placed_on_gpus", kinds=["one", "other"])
    assert [index for index, *_ in found] == [0, 1]


# ---- tensors of a GPU, which the ranks' own exchange cannot read ----


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU, of which the host finds nothing."""

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first")

    def data_ptr(self):
        raise AssertionError("the host has nothing at the address of a GPU")


class Buffered(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((3, 2), float(rank)).as_subclass(OnGpu))
        self.register_buffer("mean", torch.arange(6.0).view(2, 3).t().add(rank).as_subclass(OnGpu))
        self.register_buffer("count", torch.tensor(rank, dtype=torch.long).as_subclass(OnGpu))
        self.register_buffer("same", torch.ones(4, dtype=torch.bool).as_subclass(OnGpu))


def test_values_and_buffers_of_a_gpu_are_rank_0s():
    models, descriptor = [Buffered(rank) for rank in range(2)], shared_memory(2)

    def share(rank):
        together = Together(Ranks.local(descriptor, rank))
        together.share_values(models[rank])
        together.share_buffers(models[rank])
        together.close()

    threads = [threading.Thread(target=share, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    os.close(descriptor)
    expected = Buffered(0).state_dict()
    for model in models:
        assert all(torch.equal(value.cpu(), expected[name].cpu()) for name, value in model.state_dict().items())


class Broadcasts:
    """Ranks of which rank 0 has done everything before the others."""

    size = 2

    def __init__(self, rank, sent):
        self.rank, self.sent = rank, sent

    def broadcast(self, what, address, count):
        if self.rank == 0:
            self.sent.append(ctypes.string_at(address, count))
        else:
            assert len(self.sent[0]) == count
            ctypes.memmove(address, self.sent.pop(0), count)


def test_first_values_on_gpus_are_drawn_with_rank_0s_state(monkeypatch):
    states = {"cuda:0": torch.tensor([7, 1], dtype=torch.uint8), "cuda:1": torch.tensor([20, 2], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state.clone()}))
    sent = []
    for rank in range(2):
        name = f"cuda:{rank}"
        with Together(Broadcasts(rank, sent)).random_of_rank_0(Gpu(rank, torch.device(name))):
            assert states[name].tolist() == [7, 1]
            states[name] += 1
    assert [state.tolist() for state in states.values()] == [[8, 2], [20, 2]], "rank 0 goes on, and rank 1 with its own"


# ---- a rank that fails ----

OF_GPU = """
import atexit, os, time
atexit.register(lambda: print(time.monotonic(), flush=True))  # after all that others leave for the end
import torch
from torch import nn
from support import fake_gpu
import sluice.torch
RANK = int(os.environ["RANK"])
torch.manual_seed(3)
torch.set_num_threads(1)
fake_gpu.share_memory(devices=2)
model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
model, optimizer = sluice.torch.wrap(model, sluice.AdamW(), device="cuda", device_memory="512MiB", memory="4GiB", reserve="64MiB",
                                     units={"first": ["0.weight", "0.bias"], "last": ["2.weight", "2.bias"]}, held_units=2,
                                     device_facts=fake_gpu.FACTS, stage=int(os.environ["STAGE"]))
units = sluice.torch.engine_of(model).plan()["units"]
assert [unit["parameters"] == "ranks" for unit in units] == 2 * [os.environ["STAGE"] == "3"]
print(os.getpid())
for number in range(100):
    if RANK == 1 and number == 2:
        print(time.monotonic())
        fake_gpu.fail(os.environ["FUNCTION"], 719)
    model(torch.ones(3, 400) * (RANK + 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("function, stage", [
    ("cuLaunchKernel", 3), *(pytest.param(*row, marks=LONG) for row in (("cuLaunchKernel", 0), ("cuEventRecord", 1), ("cuEventQuery", 3))),
])  # fmt: skip
def test_a_gpu_that_fails_ends_all_ranks_with_the_reason(function, stage):
    """Nobody catches the error: the processes end by themselves."""
    outcomes = rank_pool.run_program(OF_GPU, STAGE=str(stage), FUNCTION=function)
    failed = float(outcomes[1][1].splitlines()[1])
    for rank, (status, out, errors) in enumerate(outcomes):
        said = errors.splitlines()[-1]
        assert status == 1 and re.match(r"sluice.*Error: ", said) and function in said and "LAUNCH_FAILED" in said, errors
        assert rank == 1 or "rank 1" in said
        pid, ended = out.splitlines()[0], float(out.splitlines()[-1])
        assert ended - failed < 10
        assert not [name for name in os.listdir("/dev/shm") if pid in name or "sluice" in name]


# ---- memory ----

MEASURES = """
import json
import torch
from torch import nn
from support import fake_gpu
import sluice.torch
from sluice.torch import _measures
torch.manual_seed(3)
torch.set_num_threads(1)
fake_gpu.share_memory(memory=2 << 30, devices=2)
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
model(torch.ones(1, 2048)).sum().backward()  # what PyTorch makes once
model.zero_grad()
before = _measures.resident_bytes()
model, optimizer = sluice.torch.wrap(
    model, sluice.AdamW(), device="cuda", device_memory="1GiB", memory="4GiB", reserve="64MiB", stage=3, held_units=2,
    units={str(i): [f"{i}.weight"] for i in range(4)}, links="host", device_facts=fake_gpu.FACTS,
)
plan = sluice.torch.engine_of(model).plan()
for _ in range(2):
    model(torch.ones(2, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
own, of_gpu, others, name = _measures._peak_bytes(), 0, 0, ""
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):
        name = line
    elif words[0] == "Rss:":
        of_gpu += int(words[1]) << 10 if "memfd:device memory" in name else 0
        others += int(words[1]) << 10 if "memfd:sluice ranks" in name else 0
planned = plan["predicted_peak"] - plan["bytes"]["host"]["base"]
print(json.dumps([[unit["parameters"] for unit in plan["units"]], before, own - of_gpu, others, planned]))
sluice.torch.close(model, values=False)
"""


def test_a_process_takes_what_was_planned_and_what_others_share_is_theirs():
    mib = 2**20
    for status, out, errors in rank_pool.run_program(MEASURES):
        assert status == 0, errors
        tiers, before, own, shared, planned = json.loads(out.splitlines()[-1])
        assert tiers == 4 * ["ranks"]
        # Shards of half of 64 MiB, and pieces of what ranks sum: of both ranks, of which one is this one.
        assert shared >= 2 * (32 + 128) * mib
        assert own <= before + planned + 144 * mib, "beside the plan PyTorch has gradients, and a reserve of 64 MiB"
