"""Ranks call these functions together in tests, each on every rank (support.rank_pool). Results are of JSON's types."""

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import os
import pathlib
import shutil
import tempfile
import time
import unittest.mock

import safetensors.torch
import torch
from support import fake_gpu
from support.links import no_shared_memory
from support.over_ranks_models import MODELS, WHOLE, units_of
from support.user_models import image_loss
from support.wrapped_models import on_meta, readable, small_gpt2, units_of_modules, wrap
from torch import nn
from torch.distributed.rendezvous import rendezvous

import sluice
import sluice.torch
from sluice.device import device_of
from sluice.torch import _gpu, _session, _together

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = {"device": "cuda", "device_memory": "600MiB", "reserve": "64MiB"}
torch.set_num_threads(1)
fake_gpu.begin_if_asked()


def loss_of(model, name, number):
    """The loss of a global micro-batch."""
    generator = torch.Generator().manual_seed(number)
    if name == "normed":
        x = torch.randn(8, 16, generator=generator) + number
        return model(x).square().mean()
    if name == "experts":  # ranks use others, two use none, and the last expert is never used
        return model(torch.randn(8, 16, generator=generator), number % 3).square().mean()
    if name == "convolutional":
        return image_loss(16)(model, number)
    ids = torch.randint(0, 256, (2, 16), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def _digest(model):
    together = hashlib.sha256()
    with readable(model):
        for _, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            together.update(tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return together.hexdigest()


def _loop(model, optimizer, name, steps, accumulate, clip=None, first=0, scaler=None, infinite=None, no_sync=None, between=None,
          to_none=True, reproducible=False):  # fmt: skip
    """A user's loop over this rank's part of each step's micro-batches. first: the number of its first step. infinite: the step
    in which the last rank's loss is. between: what is done after each step. reproducible: the engine takes the mean."""
    share, losses, norms = accumulate // SIZE, [], []
    for step in range(first, first + steps):
        for part in range(share):
            loss = loss_of(model, name, step * accumulate + RANK * share + part) / (1 if reproducible else share)
            losses.append(loss.item())
            if step == infinite and RANK == SIZE - 1:
                loss = loss * float("inf")
            loss = loss if scaler is None else scaler.scale(loss)
            with no_sync() if no_sync is not None and part + 1 < share else contextlib.nullcontext():
                loss.backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        if between is not None:
            between(model, optimizer)
    return losses, norms


def _scaler(infinite):
    return None if infinite is None else torch.amp.GradScaler("cpu", init_scale=1024.0)


def _result(model, losses, norms, save=None, scaler=None):
    if save is not None and RANK == 0:
        with readable(model):
            torch.save({name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}, save)
    scale = None if scaler is None else scaler.get_scale()
    return {"losses": losses, "norms": norms, "digest": _digest(model), "scale": scale}


def _wrapped(name, place, links=None, seed_of_rank=False, update="AdamW", dtype=None, compiled=False, gpu_links=None, **options):
    """links: "gloo", so that no memory is shared; "hosts", so that every two ranks share a host. gpu_links: what joins their GPUs. seed_of_rank: each rank makes other first values, of which rank 0's count.
    update: the optimizer's class. dtype: of the parameters. compiled: whether the blocks of a Llama are. facts: whether rates of GPUs are stated with which they
    pass on shards at stage 3."""
    torch.manual_seed(3 + (RANK if seed_of_rank else 0))
    model = MODELS[name]()
    if dtype is not None:
        model.to(getattr(torch, dtype))
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for i, block in enumerate(model.model.layers):
            model.model.layers[i] = torch.compile(block, backend="aot_eager")
    if options.pop("facts", False):
        options["device_facts"] = sluice.DeviceFacts(2e10, 2e10, 3e10, 1e10, 1e10, base=0, between_gpus=1e11)
    if gpu_links is not None:
        options["links"] = gpu_links
    with contextlib.ExitStack() as until:
        if links == "gloo":
            until.enter_context(no_shared_memory())
        if links == "hosts":
            until.enter_context(unittest.mock.patch.object(_together, "place_of_process", lambda: ["host", RANK // 2]))
        return wrap(model, place, getattr(sluice, update)(lr=1e-3), **({"units": units_of(name, model), "held_units": 2} | options))


def train(
    name="gpt2", steps=2, accumulate=SIZE, clip=None, place="memory", save=None, infinite=None, alone=None, to_none=True,
    stated=False, recompute=False, **options
):  # fmt: skip
    """Trains a wrapped model. alone: what rank 0 does alone after each step. stated: wrap() is told of micro-batches. recompute:
    blocks are computed again by backward passes within the backward pass."""
    reproducible = options.get("reproducible", False)
    model, optimizer = _wrapped(name, place, **options | ({"accumulate": accumulate} if reproducible or stated else {}))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    if options.get("stage") in (2, 3) and options.get("ranks") is not False:
        _check_partitioned(model, name, stated, accumulate, place, **options)
    scaler = _scaler(infinite)
    between = None if alone is None or RANK != 0 else ALONE[alone]
    losses, norms = _loop(
        model, optimizer, name, steps, accumulate, clip, scaler=scaler, infinite=infinite, between=between, to_none=to_none,
        no_sync=getattr(model, "no_sync", None), reproducible=reproducible,
    )  # fmt: skip
    made = _result(model, losses, norms, save, scaler)
    if options.get("compiled"):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    sluice.torch.close(model)
    return made


def _check_partitioned(model, name, stated, accumulate, place, stage, updates=None, facts=False, **options):
    """Checks that the model has large units, that stage 3 partitions their parameters, and that ranks on GPUs keep their parts of
    the gradients of these where the contract says so: a rank has one gradient of a step, which waits for the update in memory."""
    of = dict(model.named_parameters())
    sizes = {unit: sum(of[p].numel() * of[p].element_size() for p in names) for unit, names in units_of(name, model).items()}
    large = {unit for unit, size in sizes.items() if size > WHOLE}
    assert large, f"no stage partitions anything of {name}"
    plan = sluice.torch.engine_of(model).plan()
    if stage == 3:
        assert {unit["name"] for unit in plan["units"] if unit["parameters"] == "ranks"} == large
        assert not name.startswith("wide") or len(large) > 8, "more units than there are pieces of what ranks sum"
        shards = {unit.get("shard") for unit in plan["units"]} - {None}
        assert len(shards) == 1 and (updates != "gpu" or shards == {"device"})
        assert not facts or plan["passes_shards"]
    sums_each, to_disk = "sum_gradients" in options, (place if isinstance(place, str) else place.get("gradients")) == "disk"
    if sums_each or ("device" in options and stated and accumulate == SIZE and not to_disk and not options.get("update_in_backward")):
        assert plan["sums_in_backward"], "gradients stay whole"
        places = {"ranks", "memory", "disk"} if sums_each else {"ranks", "memory"}
        assert {unit["gradient"] for unit in plan["units"] if unit["name"] in large} <= places


def train_by_reference(name="gpt2", steps=2, accumulate=SIZE):
    """Trains without other ranks: gradients of all micro-batches are read, added here in the order of sum_gradients="each_backward", and
    handed to the step. Losses are those of this rank's micro-batches."""
    model, optimizer = _wrapped(name, "memory", ranks=False)
    share, losses = accumulate // SIZE, []
    for step in range(steps):
        kept = {}
        for part in range(share):
            of_ranks = []
            for rank in range(SIZE):
                loss = loss_of(model, name, step * accumulate + rank * share + part) / share
                losses += [loss.item()] if rank == RANK else []
                loss.backward()
                of_ranks.append({n: p.grad.clone().numpy() for n, p in model.named_parameters() if p.grad is not None})
                optimizer.zero_grad()
            for parameter in set().union(*of_ranks):
                some = next(each[parameter] for each in of_ranks if parameter in each)
                sums = [each.get(parameter, 0 * some) for each in of_ranks]
                while len(sums) > 1:
                    sums = [sum(sums[i : i + 2][1:], sums[i]) for i in range(0, len(sums), 2)]
                mean = sums[0] * sums[0].dtype.type(1 / SIZE)
                kept[parameter] = kept[parameter] + mean if parameter in kept else mean
        for parameter, p in model.named_parameters():
            p.grad = torch.from_numpy(kept[parameter].copy()) if parameter in kept else None
        optimizer.step()
        optimizer.zero_grad()
    made = _result(model, losses, [])
    sluice.torch.close(model)
    return made


def each_backward(stage, place="memory", **options):
    """Returns the messages of a read of a gradient, norms between micro-batches, one more of them than was stated, and the step."""
    model, optimizer = _wrapped("normed", place, stage=stage, accumulate=2 * SIZE, sum_gradients="each_backward", **options)
    said = []
    for attempt in (
        lambda: loss_of(model, "normed", RANK).backward(),
        lambda: next(model.parameters()).grad.clone(),
        lambda: float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        lambda: loss_of(model, "normed", RANK).backward(),
        lambda: float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        lambda: loss_of(model, "normed", RANK).backward(),
        lambda: optimizer.step(),
    ):
        try:
            said.append(attempt())
        except sluice.Error as error:
            said.append(f"{type(error).__name__}: {error}")
    sluice.torch.close(model)
    return said


def _partitioned(model):
    """How many units have their parameters in shards."""
    return [unit["parameters"] for unit in sluice.torch.engine_of(model).plan()["units"]].count("ranks")


def received(links=None, stage=3, **options):
    """Returns how many bytes messages bring this rank in a step, and how many bytes of parameters are partitioned."""
    model, optimizer = _wrapped("wide", "memory", links=links, stage=stage, **options)
    engine = sluice.torch.engine_of(model)
    assert _partitioned(model) > 8
    large = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and p.numel() > 2**17) * 4
    _loop(model, optimizer, "wide", 1, SIZE)
    before = engine.options.ranks.traffic()
    _loop(model, optimizer, "wide", 1, SIZE)
    after = engine.options.ranks.traffic()
    sluice.torch.close(model)
    return after.received + after.received_besides - before.received - before.received_besides, large


def from_hosts(stage, steps=1):
    """Returns how many bytes this rank receives from other hosts in a step, and how many its host does by the plan."""
    model, optimizer = _wrapped("gpt2", "memory", links="hosts", stage=stage)
    engine = sluice.torch.engine_of(model)
    _loop(model, optimizer, "gpt2", 1, SIZE)
    engine.options.ranks.barrier("the first step")
    before = engine.options.ranks.traffic().received_from_hosts
    _loop(model, optimizer, "gpt2", steps, SIZE)
    engine.options.ranks.barrier("the last step")
    came = (engine.options.ranks.traffic().received_from_hosts - before) / steps
    planned = engine.plan()["step"]["bytes_received_from_hosts"]
    sluice.torch.close(model)
    return came, planned


def _evaluate(model, optimizer):
    model.eval()
    with torch.no_grad():
        loss_of(model, "gpt2", 10**6)
    model.train()


def _generate(model, optimizer):
    model.eval()
    model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, do_sample=False)
    model.train()


def _save(model, optimizer):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        sluice.torch.save_file(model.state_dict(), f"{folder}/own.safetensors")
        values = safetensors.torch.load_file(f"{folder}/own.safetensors")
    with readable(model):
        assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


def _take_state(model, optimizer):
    taken = optimizer.state_dict()["state"].values()
    assert len(taken) == len(list(model.parameters())) and all(state["exp_avg"].any() for state in taken)


ALONE = {"evaluate": _evaluate, "generate": _generate, "save": _save, "state": _take_state}


def _digest_of_state(state):
    together = hashlib.sha256()
    for number, arrays in sorted(state.items()):
        for name, array in sorted(arrays.items()):
            together.update(f"{number} {name}".encode())
            together.update(array.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return together.hexdigest()


def take_state(others="never", name="gpt2", place="memory", accumulate=SIZE, stated=False, **options):
    """Trains, while rank 0 takes the optimizer's state after each step. others: when other ranks make that call, "together" with it,
    "later" or "never". Returns digests of the state, and what the training gave."""
    model, optimizer = _wrapped(name, place, **options | ({"accumulate": accumulate} if stated else {}))
    numbers, taken = itertools.count(), []

    def take(model, optimizer):
        number = next(numbers)
        if RANK == 0:
            time.sleep(0.2 * (number == 1))  # others then wait in the next step
            taken.append(_digest_of_state(optimizer.state_dict()["state"]))
        elif others == "together" or (others == "later" and number == 2):
            optimizer.state_dict()

    made = _result(model, *_loop(model, optimizer, name, 3, accumulate, between=take))
    sluice.torch.close(model)
    assert len(set(taken)) == len(taken) == 3 * (RANK == 0)
    return taken, made


def go_on(folder, way, stage=None, place="memory", saves_on_gpu=False, goes_on_on_gpu=False):
    """Trains a step, saves, and trains another; then another model that goes on from what was saved. way: "engine" or "state_dict"."""
    if saves_on_gpu or goes_on_on_gpu:
        fake_gpu.share_memory(devices=SIZE)
    model, optimizer = _wrapped("gpt2", place, stage=stage, **ON_GPU if saves_on_gpu else {})
    assert (_partitioned(model) > 0) == (stage == 3)
    _loop(model, optimizer, "gpt2", 1, SIZE)
    if way == "engine":
        where = sluice.torch.engine_of(model).save(folder)
    else:
        values, state = model.state_dict(), optimizer.state_dict()
        where = f"{folder}/state"
        if RANK == 0:
            torch.save({"model": values, "optimizer": state}, where)
    first = _result(model, *_loop(model, optimizer, "gpt2", 1, SIZE, first=1))
    sluice.torch.close(model)
    model, optimizer = _wrapped("gpt2", place, stage=stage, seed_of_rank=True, **ON_GPU if goes_on_on_gpu else {})
    assert (_partitioned(model) > 0) == (stage == 3)
    if way == "engine":
        sluice.torch.engine_of(model).load(where)
    else:
        saved = torch.load(where)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    second = _result(model, *_loop(model, optimizer, "gpt2", 1, SIZE, first=1))
    sluice.torch.close(model)
    return first, second


def load_from_folders_that_differ(folder):
    """Loads from a folder of each rank's own, of which the last one's newest checkpoint is damaged. Returns the error."""
    model, optimizer = wrap(MODELS["gpt2"](), "memory")
    for step in range(2):
        _loop(model, optimizer, "gpt2", 1, SIZE, first=step)
        made = pathlib.Path(sluice.torch.engine_of(model).save(folder))
    own = pathlib.Path(folder) / f"of-rank-{RANK}"
    for whole in made.parent.glob("step-*"):
        shutil.copytree(whole, own / whole.name)
    if RANK == SIZE - 1:
        (own / made.name / "model.safetensors").write_bytes(b"")
    try:
        sluice.torch.engine_of(model).load(own)
    except sluice.InvalidArgumentError as error:
        return str(error)
    finally:
        sluice.torch.close(model)


def from_meta(name="normed", **options):
    """Wraps a model that gets its first values by its rules, of random numbers that differ. Returns whether later ones do."""
    torch.manual_seed(3 + RANK)
    model = on_meta(MODELS[name])
    model, _ = wrap(model, "memory", **options)
    made = {"digest": _digest(model), "next": torch.rand(1).item()}
    sluice.torch.close(model)
    return made


def on_gpus(called, seed=0, schedule="random", has_peers=True, has_nccl=False, **given):
    """Calls a function of this module, whose models are on a fake GPU for each rank. has_peers: these read each other's memory. has_nccl:
    there is NCCL, a fake, too."""
    with fake_gpu.shared(seed=seed, schedule=schedule, devices=SIZE, has_peers=has_peers, has_nccl=has_nccl):
        return globals()[called](**ON_GPU | given)


def with_parts_of_gradients(stage, **options):
    """Returns the messages of reads of a gradient, norms, a second backward pass and the step where a rank keeps its own part."""
    model, optimizer = _wrapped("normed", "device", stage=stage, accumulate=SIZE, **options)
    said = []
    for attempt in (
        lambda: next(model.parameters()).grad.clone(),
        lambda: float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        lambda: loss_of(model, "normed", RANK).backward(),
        lambda: optimizer.step(),
    ):
        if not said:
            loss_of(model, "normed", RANK).backward()
        try:
            said.append(attempt())
        except sluice.Error as error:
            said.append(f"{type(error).__name__}: {error}")
    with sluice.torch.full_parameters(model):
        said.append(float(next(model.parameters()).grad.norm()))
    sluice.torch.close(model)  # with gradients that were kept
    return [*said, next(model.parameters()).grad]


def apart(skips, **options):
    """Returns the messages where the last rank drops its gradients, or has none, and the others step."""
    model, optimizer = _wrapped("normed", "device", stage=2, accumulate=SIZE, **options)
    try:
        for _ in range(2):
            if skips or RANK < SIZE - 1:
                loss_of(model, "normed", RANK).backward()
            if skips and RANK == SIZE - 1:
                optimizer.zero_grad()
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    except sluice.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sluice.torch.close(model, values=False)


def links_of(device_memory, device, **options):
    """Returns the links that join the ranks by the plan of a model of large units."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    given = {"device": device, "device_memory": device_memory, "device_facts": fake_gpu.FACTS} | options
    model, _ = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", place="device", stage=1, units=units_of_modules(model), **given)
    links = sluice.torch.engine_of(model).plan()["links"]
    sluice.torch.close(model, values=False)
    return links


def joined(of_ranks, device_facts=fake_gpu.FACTS, **options):
    """Returns the links that join the ranks by the plan, and whether it is known how fast, or the error. of_ranks: the `links` that each
    rank asks for."""
    asked = {"links": of_ranks[RANK]} if of_ranks[RANK] else {}
    model = MODELS["normed"]()
    try:
        model, _ = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", device_facts=device_facts, patience=60, **options | asked)
    except sluice.Error as error:
        return f"{type(error).__name__}: {error}"
    plan = sluice.torch.engine_of(model).plan()
    sluice.torch.close(model, values=False)
    return [plan["links"], plan["rates"]["between_gpus"] > 0]


def placed_on_gpus(devices=SIZE, of_ranks=(), local_ranks=None, on_meta=False, kinds=None, **options):
    """Wraps a model, where each process sees so many GPUs. of_ranks: what each rank gives besides the options. local_ranks, kinds: each
    rank's LOCAL_RANK, and kind of GPU. Returns the number of its GPU, or the error, and whether the model is as it was."""
    torch.manual_seed(3)
    with torch.device("meta" if on_meta else "cpu"):
        model = MODELS["normed"]()
    were = [id(p) for p in model.parameters()]
    given = {"device_memory": "512MiB", "device": "cuda", "device_facts": fake_gpu.FACTS, "reserve": "64MiB"} | options
    given |= of_ranks[RANK] if of_ranks else {}
    given = {name: value for name, value in given.items() if value is not None}
    with contextlib.ExitStack() as until:
        until.enter_context(fake_gpu.shared(devices=devices))
        if local_ranks is not None:
            until.enter_context(unittest.mock.patch.dict(os.environ, LOCAL_RANK=local_ranks[RANK]))
        if kinds is not None:
            until.enter_context(unittest.mock.patch.object(_gpu.Gpu, "kind", kinds[RANK]))
        try:
            model, _ = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", place="memory", patience=60, **given)
        except sluice.Error as error:
            return f"{type(error).__name__}: {error}", [id(p) for p in model.parameters()] == were
        session = next(model.parameters())._sluice
        device = device_of(session.engine)
        del session
        sluice.torch.close(model, values=False)
        return device["index"], device["pci_address"], device["shared"]


def closed_without_room(**options):
    """Closes a model for whose values the last rank has no room, and then trains on. Returns the error, and what it has then."""
    model, optimizer = _wrapped("normed", "memory", **options)
    copied = _session._full.in_gpu

    def lacks(presence, home, access):
        if RANK == SIZE - 1 and home.name == "norm.bias":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copied(presence, home, access)

    with unittest.mock.patch.object(_session._full, "in_gpu", lacks):
        try:
            sluice.torch.close(model)
            text = None
        except sluice.Error as error:
            text = f"{type(error).__name__}: {error}"
    losses, _ = _loop(model, optimizer, "normed", 2, SIZE)
    made = _result(model, losses, [])
    sluice.torch.close(model)
    return text, made


_groups = itertools.count()


@functools.cache
def _store():
    return next(iter(rendezvous("env://")))[0]


def _init_process_group():
    """Makes the script's group under names of its own: a second default one would find the addresses of the first."""
    store = torch.distributed.PrefixStore(f"test/{next(_groups)}", _store())
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)


def of_group(kind):
    """Trains with ranks of a process group: the script's own, or one that is given."""
    _init_process_group()
    try:
        group = torch.distributed.new_group() if kind == "given" else None
        made = train(ranks=group)
        torch.distributed.barrier()  # the script's group is as it was
        return made
    finally:
        torch.distributed.destroy_process_group()


def refusal(differing=None, **options):
    """Wraps a model. differing: an option and its value on the last rank alone. Returns the error, and whether the model is as it
    was, and can be wrapped then."""
    torch.manual_seed(3)
    model = small_gpt2()
    before = _digest(model)
    given = options | ({differing[0]: differing[1]} if differing and RANK == SIZE - 1 else {})
    try:
        wrap(model, "memory", sluice.AdamW(lr=given.pop("lr", 1e-3)), **given)
        text = None
    except sluice.Error as error:
        text = f"{type(error).__name__}: {error}"
    same = _digest(model) == before
    sluice.torch.close(wrap(model, "memory")[0])
    return text, same


def address_of_a_gradient():
    """Uses a gradient as a collective of torch.distributed does. Returns the error."""
    model, optimizer = _wrapped("gpt2", "memory")
    loss_of(model, "gpt2", RANK).backward()
    try:
        next(model.parameters()).grad.data_ptr()
    except sluice.StateError as error:
        return str(error)
    finally:
        optimizer.zero_grad()
        sluice.torch.close(model)


def other_threads():
    """Wraps a model where the last rank computes by more threads. Returns the error."""
    torch.set_num_threads(2 if RANK == SIZE - 1 else 1)
    try:
        _wrapped("gpt2", "memory", reproducible=True, accumulate=SIZE)
        return None
    except sluice.InvalidArgumentError as error:
        return str(error)
    finally:
        torch.set_num_threads(1)


def unreproducible(what):
    """Gives a loop a setting or a call that lets bits depend on the ranks. Returns the error, and how the run goes on after it."""
    model, optimizer = _wrapped("gpt2", "memory", reproducible=True, accumulate=2 * SIZE)
    first = next(model.parameters())

    def backward():
        loss_of(model, "gpt2", 7).backward()

    def drop():
        optimizer.zero_grad()

    backward()
    if what != "early":
        backward()
    acts = {
        "early": optimizer.step, "late": backward, "writes": lambda: first.grad.clamp_(-1, 1),
        "adds": lambda: first.grad.add_(torch.ones_like(first.grad)), "sets": lambda: setattr(first.grad, "data", first.detach()),
        "kept": lambda: (optimizer.step(), backward()),
    }  # fmt: skip
    try:
        acts[what]()
        text = None
    except sluice.Error as error:
        text = f"{type(error).__name__}: {error}"
    drop()
    losses, _ = _loop(model, optimizer, "gpt2", 1, 2 * SIZE, reproducible=True)
    sluice.torch.close(model)
    return text, all(map(math.isfinite, losses))


def buffer_of_rank(how):
    """Buffers that the ranks change, alike or not, without a trace in their versions. Returns the error."""
    model, optimizer = _wrapped("gpt2", "memory", reproducible=True, accumulate=SIZE)
    model.transformer.register_buffer("changed", torch.zeros(4), persistent=how == "saved")
    for step in range(2):
        loss_of(model, "gpt2", 7).backward()
        model.transformer.changed.data.fill_(step + (0 if how == "alike" else RANK))
        try:
            optimizer.step()
        except sluice.Error as error:
            return f"{type(error).__name__}: {error}"
        finally:
            optimizer.zero_grad()
    sluice.torch.close(model)
    return None


def _with_ddp(name="gpt2", steps=2, accumulate=SIZE, clip=None, save=None, infinite=None, to_none=True):
    torch.manual_seed(3)
    model = MODELS[name]()
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=name in ("experts", "mixtral"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = _scaler(infinite)
    losses, norms = _loop(ddp, optimizer, name, steps, accumulate, clip, scaler=scaler, infinite=infinite, no_sync=ddp.no_sync,
                          to_none=to_none)  # fmt: skip
    return _result(model, losses, norms, save, scaler)


def train_ddp(**settings):
    """Trains a plain model with DistributedDataParallel over Gloo, which ends before its group: it may hang where it keeps the
    group's last reference."""
    _init_process_group()
    try:
        made = _with_ddp(**settings)
        gc.collect()
        torch.distributed.barrier()
        return made
    finally:
        torch.distributed.destroy_process_group()


def failing_backward(when, **options):
    """A model on whose last rank backward() fails, "early", before anything was summed, or "late", and the script goes on. Returns
    what each rank ends with: an error, or how often the engine has stepped."""
    model, optimizer = _wrapped("gpt2", "memory", update_in_backward=True, accumulate=SIZE, **options)
    engine = sluice.torch.engine_of(model)
    name = "lm_head" if when == "early" else "transformer.h.0"
    hook = dict(model.named_modules())[name].register_full_backward_pre_hook(_refuse_once(RANK == SIZE - 1))
    for _ in range(2):
        try:
            with contextlib.suppress(ArithmeticError):
                loss_of(model, "gpt2", RANK).backward()
                optimizer.step()
                break
        except sluice.Error as error:
            return str(error)
    hook.remove()
    made = engine.steps
    sluice.torch.close(model)
    return made


def _refuse_once(fails):
    """A hook that raises in its first call, where it fails."""
    left = [fails]

    def hook(module, gradients):
        if left[0]:
            left[0] = False
            raise ArithmeticError("the script's own")

    return hook


def redone(fails, **options):
    """Trains three steps, where the last rank's backward() of the third one fails, if `fails`, after sums have begun. Each rank that
    gets an error begins the step again. Returns the errors, and the values."""
    model, optimizer = _wrapped("gpt2", "memory", accumulate=SIZE, **options)
    _loop(model, optimizer, "gpt2", 2, SIZE)
    block = dict(model.named_modules())["transformer.h.0"]
    hook = block.register_full_backward_pre_hook(_refuse_once(fails and RANK == SIZE - 1))
    errors = []
    for _ in range(2):
        try:
            loss_of(model, "gpt2", RANK).backward()
            break
        except (ArithmeticError, sluice.StateError) as error:
            errors.append(str(error))
            optimizer.zero_grad()
    hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    made = _digest(model)
    sluice.torch.close(model)
    return errors, made
