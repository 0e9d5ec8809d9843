"""The stages of a pipeline call these functions together in tests, each on every rank (support.rank_pool). Results are of JSON's types."""

import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import tempfile
import time
import unittest.mock
from collections import namedtuple
from pathlib import Path

import torch
import transformers
from support import fake_gpu, families
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.links import no_shared_memory
from support.wrapped_models import on_meta
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import sluice
import sluice.torch

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = {"device": "cuda", "device_memory": "600MiB", "device_facts": fake_gpu.FACTS}
torch.set_num_threads(1)
STEPS, ROWS = 2, 12


def layers():
    """Layers with buffers, with one that writes to its input, and some without parameters, of which one is there twice."""
    tanh = nn.Tanh()
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.BatchNorm1d(32), tanh, nn.Linear(32, 24), nn.ReLU(inplace=True), nn.Linear(24, 4), tanh
    )  # fmt: skip


def deep():
    """Layers that are as many with parameters as three stages have chunks, where each has two. One without any is in two of them."""
    tanh = nn.Tanh()
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.BatchNorm1d(32), tanh, nn.Linear(32, 24), nn.Linear(24, 24), nn.ReLU(inplace=True),
        nn.Linear(24, 16), nn.Linear(16, 4), tanh,
    )  # fmt: skip


class Nested(nn.Module):
    """A layer that takes and gives dicts, lists, tuples, None and numbers. Of two tensors the next layer uses one."""

    def __init__(self, first=False, last=False):
        super().__init__()
        self.first, self.last = first, last
        self.wide, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value):
        x, count = (value, 0) if self.first else (value["x"][0], value["count"])
        if not self.first:
            assert value["x"][1] is value["x"][0] and value["none"] == (None, "text", 0.5) and value["ids"].dtype == torch.int64
            again, (most, indices) = value["pair"][7]
            assert again is x and indices.shape == x.shape[:1]
            x = x + 0.5 * value["x"][1] + most[:, None]
        x = self.wide(x).tanh()
        if self.last:
            return x[:, :4] * count
        besides = {"none": (None, "text", 0.5), "count": count + 1, "ids": torch.arange(3), "empty": x[:0]}
        return {"x": [x, x], "other": self.unused(x), "pair": {7: (x, tuple(x.max(dim=1)))}, **besides}


def nested():
    return [Nested(first=True), Nested(), Nested(), Nested(last=True)]


class Counts(nn.Module):
    """A layer whose output has a buffer, which its next call writes; or that uses one."""

    def __init__(self, first):
        super().__init__()
        self.own, self.first = nn.Linear(16, 16 if first else 4), first
        if first:
            self.register_buffer("seen", torch.zeros(20000))

    def forward(self, value):
        if not self.first:
            x, seen = value
            return self.own(x) * seen.mean()
        with torch.no_grad():
            self.seen += 1
        return self.own(value), self.seen


def counting():
    return [nn.Linear(16, 16), Counts(True), Counts(False)]


class Recurrent(nn.Module):
    """A layer of PyTorch that also keeps its weights in a list."""

    def __init__(self):
        super().__init__()
        self.own = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.own(x[:, None])[0][:, 0]


def recurrent():
    return [Recurrent(), Recurrent(), nn.Linear(16, 4)]


def channels_last():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(),
        nn.Linear(512, 4),
    ).to(memory_format=torch.channels_last)  # fmt: skip


class Experts(nn.Module):
    """Of its layers a call uses the one that its values choose, and never the last."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        return self.experts[int(x.detach().sum().abs() * 10) % 3](x)


def experts():
    return [Experts(), nn.Linear(16, 16), Experts(), nn.Linear(16, 4)]


class Twice(nn.Module):
    """Calls a layer on its own input and then on its output, which alone needs a gradient in the first stage."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(16, 16)

    def forward(self, x):
        return self.own(torch.tanh(self.own(x)))


def twice():
    return [Twice(), nn.Linear(16, 16), Twice(), nn.Linear(16, 4)]


def compiled():
    """Two of its blocks are graphs, each made in one of PyTorch's ways. (No compiler of C++ is asked for.)"""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)]
    layers[1].compile(backend="aot_eager")
    return [layers[0], layers[1], torch.compile(layers[2], backend="aot_eager"), nn.Linear(16, 4)]


def broad():
    """Layers of which two have enough to be partitioned."""
    return nn.Sequential(
        nn.Linear(16, 640), nn.ReLU(), nn.Linear(640, 640), nn.BatchNorm1d(640), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 4)
    )  # fmt: skip


def gpt2(tied=False, **settings):
    return families.FAMILIES["GPT-2"](tie_word_embeddings=tied, **settings)


def hooked():
    """Its embedding's output is multiplied by a hook, as NEFTune adds noise to it, and needs a gradient, as for LoRA."""
    model = gpt2(tied=True)
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 1.5)
    model.enable_input_require_grads()
    return model


def _of_family(name, **settings):
    return functools.partial(families.FAMILIES[name], **settings)


OF_TRANSFORMERS = families.FAMILIES | {
    "gpt2": gpt2, "tied": lambda: gpt2(tied=True), "broad_tied": lambda: gpt2(tied=True, vocab_size=12000), "hooked": hooked,
    "deep_gpt2": lambda: gpt2(n_layer=6), "deep_tied": lambda: gpt2(tied=True, n_layer=6),
    "llama": _of_family("Llama"), "deep_llama": _of_family("Llama", num_hidden_layers=6),
    # Its blocks return tuples, and a norm follows its embedding.
    "bloom": _of_family("BLOOM", tie_word_embeddings=False),
    # Its code reads the type of the head's weight, on each stage.
    "mamba": functools.partial(
        families.of, "mamba", hidden_size=32, num_hidden_layers=4, state_size=4, tie_word_embeddings=False, **families.COMMON
    ),
    # A product follows its embedding, and precedes its head, which shares the table.
    "opt": _of_family("OPT", word_embed_proj_dim=16, tie_word_embeddings=True, pad_token_id=1),
    # Its embedding multiplies what it looks up, and its head, which shares the table, is the last module with parameters.
    "gemma": _of_family("Gemma 3", tie_word_embeddings=True, pad_token_id=0),
}  # fmt: skip
MODELS = {
    "layers": layers, "deep": deep, "experts": experts, "broad": broad, "nested": nested, "counting": counting, "recurrent": recurrent,
    "channels_last": channels_last, "twice": twice, "compiled": compiled, **OF_TRANSFORMERS,
}  # fmt: skip


def made(name, dtype="float32", meta=False):
    """meta: it gets its first values when it is wrapped."""
    torch.manual_seed(3 + RANK * meta)  # rank 0's numbers count
    with torch.device("meta" if meta else "cpu"):
        model = MODELS[name]()
    parts = model if isinstance(model, list) else [model]
    for part in parts:
        part.to(getattr(torch, dtype))
    return model


def batch_of(name, step, dtype="float32", rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    if name in OF_TRANSFORMERS:
        ids = torch.randint(0, 128, (rows, 8), generator=generator)
        mask = torch.ones(rows, 8, dtype=torch.int64)
        mask[:, :2] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    shape = (rows, 1, 8, 8) if name == "channels_last" else (rows, 16)
    x = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    return x, torch.randn(rows, 4, generator=generator).to(x.dtype)


def loss_fn(output, targets):
    return (output - targets).float().square().mean()


def _loss_of(model, name, part):
    # A Pipeline calls models so. With a cache keys have another layout, and their products other bits on some processors.
    return model(**part, use_cache=False).loss if isinstance(part, dict) else loss_fn(model(part[0]), part[1])


def digests(model):
    return {
        name: hashlib.sha256(t.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in model.state_dict().items()
    }


def units_of(model):
    """Every module with parameters of its own is a unit, where none is another one's."""
    named = [(name, len(list(m.parameters(recurse=False)))) for name, m in model.named_modules()]
    if sum(count for _, count in named) > len(list(model.parameters())):
        return None
    return {name or "model": [name] for name, count in named if count and name}


def _options(model, place, update, **options):
    made = {"memory": "4GiB", "disk": tempfile.gettempdir(), "place": place, "reserve": "128MiB", "units": units_of(model), "held_units": 2}
    kinds = {"SGD": {"momentum": 0.9}}
    return getattr(sluice, update)(lr=1e-2, **kinds.get(update, {})), made | options


def _scheduler(optimizer, first):
    """Of a run that begins anew; the rates of one that goes on come with the checkpoint, and its schedule would be the user's to save."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if first == 0 else None


def _parts(batch, count):
    cut = {k: v.chunk(count) for k, v in batch.items()} if isinstance(batch, dict) else [t.chunk(count) for t in batch]
    return [{k: v[i] for k, v in cut.items()} if isinstance(cut, dict) else tuple(t[i] for t in cut) for i in range(count)]


def _share_of(name, step, dtype, rank, size, reproducible):
    """A rank's batch of a step: one of its own, or its share of the one that reproducible runs have at any number of ranks."""
    if reproducible:
        return _parts(batch_of(name, step, dtype), size)[rank]
    return batch_of(name, step + 100 * rank, dtype)


def whole(
    name, micro_batches, clip=None, dtype="float32", place="memory", update="AdamW", load=None, save=None, steps=STEPS, first=0,
    scheduled=True, meta=False, data=1, reproducible=False, **options,
):  # fmt: skip
    """The twin: rank 0 wraps the whole model, and adds up the micro-batches' gradients. data: all ranks do, with a batch each, or, with
    reproducible, a share of one; the engine then takes the mean over the micro-batches."""
    if data not in (1, SIZE) or RANK >= data:
        return None
    model = made(name, dtype, meta)
    model = nn.Sequential(*model) if isinstance(model, list) else model
    settings, given = _options(model, place, update, **options)
    counted = {"reproducible": True, "accumulate": micro_batches * data} if reproducible else {}
    model, optimizer = sluice.torch.wrap(model, settings, ranks=None if data > 1 else False, **given, **counted)
    scheduler, losses, norms = _scheduler(optimizer, first), [], []
    if load is not None:
        sluice.torch.engine_of(model).load(load)
    for step in range(first, first + steps):
        of_step = []
        for part in _parts(_share_of(name, step, dtype, RANK, data, reproducible), micro_batches):
            loss = _loss_of(model, name, part) / (1 if reproducible else micro_batches)
            loss.backward()
            of_step.append(loss.detach())
        mean = sum(loss.item() for loss in of_step) / micro_batches
        losses.append((loss.new_tensor(mean) if reproducible else functools.reduce(torch.add, of_step)).item())
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None and scheduled:
            scheduler.step()
    if save is not None:
        sluice.torch.engine_of(model).save(save)
    found = {"losses": losses, "norms": norms, "values": digests(model)}
    sluice.torch.close(model)
    return found


def planned(module):
    """The number of a stage's GPU (None: the CPU), ZeRO's stage, and the tiers of parameters, gradients and state."""
    engine = sluice.torch.engine_of(module)
    plan = engine.plan()
    tiers = {unit[part] for unit in plan["units"] for part in ("parameters", "gradient", "state")}
    return [None if engine.gpu is None else engine.gpu.index, plan["stage"], *sorted(tiers)]


def piped(
    name, micro_batches, clip=None, dtype="float32", place="memory", update="AdamW", pipeline="1f1b", links=None, load=None, save=None,
    steps=STEPS, first=0, recompute=False, scheduled=True, meta=False, reproducible=False, exchanged=None, **options
):  # fmt: skip
    """Trains a stage. micro_batches: of a pipeline; of a reproducible run those that all pipelines have together. exchanged: the bytes of
    losses and norms that ranks exchange at once."""
    if exchanged is not None:
        with unittest.mock.patch("sluice.torch._pipeline.MOST_EXCHANGED", exchanged):
            return piped(
                name, micro_batches, clip, dtype, place, update, pipeline, links, load, save, steps, first, recompute, scheduled, meta,
                reproducible, **options,
            )  # fmt: skip
    model = made(name, dtype, meta)
    layers = nn.Sequential(*model) if isinstance(model, list) else model
    settings, given = _options(layers, place, update, **options)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with no_shared_memory() if links == "gloo" else contextlib.nullcontext():
        if reproducible:
            micro_batches //= 2 if "data=2" in given.get("mesh", "") else 1
        pipe = sluice.torch.Pipeline(model, settings, micro_batches=micro_batches, pipeline=pipeline, reproducible=reproducible, **given)
    scheduler, losses, norms = _scheduler(pipe.optimizer, first), [], []
    if load is not None:
        pipe.load(load)
    for step in range(first, first + steps):
        batch = _share_of(name, step, dtype, pipe.data_rank, pipe.data_ranks, reproducible)
        if clip is None:
            losses.append(pipe.train_step(batch, None if isinstance(batch, dict) else loss_fn).item())
        else:
            losses.append(pipe.forward_backward(batch, None if isinstance(batch, dict) else loss_fn).item())
            norms.append(pipe.clip_grad_norm_(clip).item())
            pipe.optimizer.step()
            pipe.optimizer.zero_grad(set_to_none=not reproducible)
        if scheduler is not None and scheduled:
            scheduler.step()
    if save is not None:
        pipe.save(save)
    found = {"losses": losses, "norms": norms, "values": digests(pipe), "place": [pipe.data_rank, pipe.stage]}
    found["shards"] = sum("shard" in unit for module in pipe.modules for unit in sluice.torch.engine_of(module).plan()["units"])
    found["plan"], *found["plans_of_others"] = map(planned, pipe.modules)
    pipe.close()
    return found


class _OnGpu(sluice.torch.Pipeline):
    gpu_links = None

    def __init__(self, *args, **given):
        given |= {"links": self.gpu_links}
        super().__init__(*args, **{name: value for name, value in given.items() if value is not None})
        assert sluice.torch.engine_of(self.module).gpu is not None


def on_gpus(called, seed=0, schedule="random", devices=SIZE, gpu_links=None, **given):
    """Calls a function of this module, whose stages are on fake GPUs, of which each process sees so many. gpu_links: what joins those of ranks
    with the same stage."""
    with (
        fake_gpu.shared(seed=seed, schedule=schedule, devices=devices, has_nccl=gpu_links == "nccl"),
        unittest.mock.patch.object(sluice.torch, "Pipeline", _OnGpu),
        unittest.mock.patch.object(_OnGpu, "gpu_links", gpu_links),
    ):
        return globals()[called](**ON_GPU | given)


def closed(**options):
    """Lists what is on this rank's GPU after a Pipeline, which is still there, was closed."""
    pipe = sluice.torch.Pipeline(made("tied"), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2, **options)
    pipe.train_step(batch_of("tied", 0))
    pipe.close()
    return fake_gpu.alive()


def of_pytorch(pipeline, rows=32768, width=256):
    """The memory of PyTorch on a stage of wide layers: estimated, planned and measured. Arrays of this size, 32 MiB, are not in the C
    library's heap, which earlier tests in the process have left in pieces."""
    model, x = [nn.Linear(width, width) for _ in range(8)], torch.ones(4 * rows, width)
    pipe = sluice.torch.Pipeline(model, sluice.SGD(lr=1e-3), memory="4GiB", micro_batches=4, pipeline=pipeline)
    for _ in range(2):
        pipe.train_step((x, x), loss_fn)
    found = sluice.torch.engine_of(pipe.module).plan()["pytorch"]
    pipe.close()
    return found


# ---- what is refused, and what fails ----


def _shared():
    """A list whose last layer has the weight of the first one."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return [first, nn.Linear(8, 8), last]


class _Calls(nn.Module):
    """A layer that calls another one, which it does not register."""

    def __init__(self, other):
        super().__init__()
        self.own, self.others = nn.Linear(8, 8), (other,)

    def forward(self, x):
        return self.own(self.others[0](x))


def _calling(between=0):
    """A list whose last layer calls the first one."""
    first = nn.Linear(8, 8)
    return [first, *_linears(between), _Calls(first)]


def _beside():
    """A model of transformers with a parameter beside its blocks."""
    model = gpt2()
    model.transformer.scale = nn.Parameter(torch.ones(1))
    return model


class _Shifts(transformers.GPT2LMHeadModel):
    """It looks up other tokens than it is called with."""

    def forward(self, input_ids, **given):
        return super().forward((input_ids + 1) % 128, **given)


class _Gives(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.own, self.value = nn.Linear(8, 8), value

    def forward(self, x):
        return self.own(x), self.value


class _Grows(nn.Module):
    """Its output has another shape in each call."""

    def __init__(self):
        super().__init__()
        self.own, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return torch.cat([self.own(x)] * self.calls)


class _Wide(nn.Module):
    """Of a micro-batch of 4096 rows it keeps 64 MiB for backward. It cannot be computed, only estimated."""

    def __init__(self):
        super().__init__()
        self.own, self.back = nn.Linear(8, 4096), nn.Linear(4096, 8)

    def forward(self, x):
        if not isinstance(x, FakeTensor):
            raise RuntimeError("a call is computed")
        return self.back(self.own(x).relu())


def _held():
    """Layers each of which keeps 16 MiB of a micro-batch of 1024 rows."""
    return [nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 8)) for _ in range(4)]


_MEASURED = {"wide": 800, "held": 600}  # MiB beside what the process has


def _resident():
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))


def _linears(count=2):
    return [nn.Linear(8, 8) for _ in range(count)]


REFUSED = {
    "mixtral": _of_family("Mixtral", output_router_logits=True), "fewer": lambda: _linears(1),
    "without": lambda: nn.Sequential(*_linears(1), nn.ReLU()),
    "frozen": lambda: [nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)],
    "shared": _shared, "calling": _calling, "calling_third": lambda: _calling(1) + _linears(1), "shared_of_three": lambda: _shared() + _linears(1),
    "without_third": lambda: nn.Sequential(*_linears(2), nn.ReLU(), *_linears(1)), "four": lambda: _linears(4),
    "tied": lambda: gpt2(tied=True), "shifts": lambda: _Shifts(gpt2(tied=True).config), "beside": _beside,
    "module": lambda: Nested(), "set": lambda: [_Gives({1}), nn.Linear(8, 8)],
    "local": lambda: [_Gives(namedtuple("Local", "x")(None)), nn.Linear(8, 8)], "grows": lambda: [_Grows(), nn.Linear(8, 8)],
    "wide": lambda: [_Wide(), _Wide()], "held": _held, "normed": lambda: [*_linears(), nn.BatchNorm1d(8)],
    "fails": lambda: [nn.Linear(8, 8), nn.Linear(9, 8)], "linears": _linears,
    "numbers": lambda: [1, 2], "meta": lambda: [_Gives(torch.empty(2, device="meta")), nn.Linear(8, 8)],
}  # fmt: skip


def traced(path):
    """The events of the trace of a stage that trains a step."""
    torch.manual_seed(3)
    pipe = sluice.torch.Pipeline(_linears(), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=3, trace_events=1000)
    begin = time.monotonic()
    pipe.train_step((torch.ones(6, 8), torch.ones(6, 8)), torch.nn.functional.mse_loss)
    seconds = time.monotonic() - begin
    sluice.torch.engine_of(pipe.module).save_trace(path + str(RANK))
    pipe.close()
    events = json.loads(Path(path + str(RANK)).read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["dur"] <= 1e6 * seconds]
    return [(e["cat"], e["name"], e.get("args", {}).get("bytes", 0)) for e in spans]


def refused(what, rows=8, differs=False, of_ranks=(), batch_on="cpu", targets=None, gradients=True, **options):
    """The error of a Pipeline, or of its first step. differs: the last rank has another batch; of_ranks: what each rank gives besides the
    options, and, in a list, the rows of its batch; targets: of what kind they are."""
    rows = rows[RANK] if isinstance(rows, list) else rows
    torch.manual_seed(3)
    given = {"memory": "4GiB", "reserve": "64MiB", "micro_batches": 2} | options | (of_ranks[RANK] if of_ranks else {})
    if what in _MEASURED:
        given |= {"memory": _resident() + (_MEASURED[what] << 20), "reserve": None}
    try:
        pipe = sluice.torch.Pipeline(REFUSED[what](), sluice.AdamW(), **given)
        batch = torch.ones(rows, 8) * (2 if differs and RANK == SIZE - 1 else 1), torch.ones(rows, 8, device=batch_on)
        if what == "tied":
            batch = {"inputs_embeds": torch.ones(rows, 8, 32), "labels": torch.ones(rows, 8, dtype=torch.int64)}
        if what == "shifts":
            batch = {"input_ids": torch.ones(rows, 8, dtype=torch.int64)}
        if targets is not None:
            batch = batch[0], {"numbers": [0.0] * rows, "array": batch[1].numpy()}[targets]
        with torch.set_grad_enabled(gradients):
            pipe.train_step(batch, (lambda output, _: output.logits.sum()) if what == "shifts" else loss_fn)
    except (sluice.Error, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    pipe.close()
    return None


def not_finite(**options):
    """A step whose gradients are infinite on the last rank alone is refused on all, and the next one is as if it had not been."""
    torch.manual_seed(3)
    pipe = sluice.torch.Pipeline(_linears(4), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2, **options)
    x, before = torch.ones(4, 8), digests(pipe)
    text = None
    try:
        factor = float("inf") if RANK == SIZE - 1 else 1.0
        pipe.train_step((x, x), lambda output, targets: output.sum() * (output.detach() * factor).sum())
    except sluice.NotFiniteError as error:
        text = str(error)
    same = digests(pipe) == before
    pipe.optimizer.zero_grad()
    loss = pipe.train_step((x, x), loss_fn).item()
    changed = digests(pipe) != before
    pipe.close()
    return text, same, changed, loss


def shapes(**options):
    """Steps of other shapes, and of other modes, follow each other, and ranks along data have others. Returns whether losses are those of
    the whole model."""
    torch.manual_seed(3)
    layers = _linears(4)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    plain.load_state_dict(nn.Sequential(*layers).state_dict())
    pipe = sluice.torch.Pipeline(layers, sluice.SGD(lr=0.0), memory="4GiB", reserve="64MiB", micro_batches=2, **options)
    same = []
    for rows, train in ((4, True), (8, True), (4, True), (4, False), (8, True), (6, True)):
        pipe.module.train(train)
        batches = [torch.randn(rows + 2 * data, 8, generator=torch.Generator().manual_seed(rows + data)) for data in range(pipe.data_ranks)]
        losses = [sum(loss_fn(plain(part), part) / 2 for part in x.chunk(2)).item() for x in batches]
        expected, x = torch.tensor(sum(losses) / len(losses)).item(), batches[pipe.data_rank]
        same.append(pipe.evaluate((x, x), loss_fn).item() == pipe.train_step((x, x), loss_fn).item() == expected)
    pipe.close()
    return same


def reproducible_again():
    """The errors of a second batch before the step and after it, and whether a step that follows what they advise has a loss."""
    pipe = sluice.torch.Pipeline(_linears(), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2, reproducible=True)
    x, texts = torch.ones(4, 8), []
    pipe.forward_backward((x, x), loss_fn)
    for follows in (pipe.optimizer.step, functools.partial(pipe.optimizer.zero_grad, set_to_none=False)):
        try:
            pipe.forward_backward((x, x), loss_fn)
        except sluice.StateError as error:
            texts.append(str(error))
        follows()
    loss = pipe.train_step((x, x), loss_fn).item()
    pipe.close()
    return texts, loss


def evaluated_unequally():
    """The loss of ranks along data whose batches have unlike numbers of rows."""
    pipe = sluice.torch.Pipeline(
        _linears(), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2, mesh=f"data={SIZE}", reproducible=True
    )
    x = torch.ones(4 * (RANK + 1), 8)
    loss = pipe.evaluate((x, x), loss_fn).item()
    pipe.close()
    return loss


def misused(**options):
    """The errors of what a stage alone cannot do, or what ranks do differently."""
    torch.manual_seed(3)
    pipe = sluice.torch.Pipeline(gpt2(), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2, **options)
    batch = batch_of("gpt2", 0)
    pipe.forward_backward(batch)
    errors, scaler = [], torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(pipe.module.parameters(), 1.0, foreach=False),
        lambda: torch.nn.utils.clip_grad_norm_(pipe.module.parameters(), 1.0),
        lambda: scaler.unscale_(pipe.optimizer),
        lambda: pipe.module.save_pretrained(tempfile.gettempdir()),
        lambda: pipe.module(**batch),
        lambda: pipe.module.generate(batch["input_ids"], max_new_tokens=2),
        lambda: pipe.forward_backward(batch | {"output_hidden_states": True}),
        lambda: (pipe.evaluate if RANK else pipe.forward_backward)(batch),
        lambda: pipe.forward_backward(batch | {"labels": batch["labels"] + (RANK == SIZE - 1)}),
        lambda: pipe.clip_grad_norm_(1.0 + RANK),
        lambda: (pipe.optimizer.param_groups[0].update(lr=0.1 + RANK), pipe.optimizer.step()),
        lambda: [pipe.close() for _ in range(2)] and pipe.train_step(batch),
    ):
        try:
            use()
            errors.append(None)
        except sluice.Error as error:
            errors.append(str(error))
    return errors


def groups():
    """Groups that users give, of names of the whole model, with what a stage's optimizer has of them."""
    torch.manual_seed(3)
    model = nn.Sequential(*_linears(SIZE))
    given = [{"params": [n for n, _ in model.named_parameters() if "bias" in n], "weight_decay": 0.0}, {"params": ["0.weight"], "lr": 0.5}]
    pipe = sluice.torch.Pipeline(model, sluice.AdamW(lr=0.1), memory="4GiB", reserve="64MiB", micro_batches=1, param_groups=given)
    found = [[len(group["params"]), group["lr"], group["weight_decay"]] for group in pipe.optimizer.param_groups]
    state = pipe.optimizer.state_dict()
    pipe.close()
    return found, len(state["param_groups"])


def thawed(frozen="0", **options):
    """Layers are frozen and trained again between steps. Returns whether the losses are those of the whole model."""
    torch.manual_seed(3)
    whole_model = nn.Sequential(*_linears(4))
    pipe = sluice.torch.Pipeline(copy.deepcopy(whole_model), sluice.SGD(lr=0.1), memory="4GiB", reserve="64MiB", micro_batches=2, **options)
    plain = torch.optim.SGD(whole_model.parameters(), lr=0.1)
    x, y = torch.ones(4, 8), torch.zeros(4, 8)
    same = []
    for step in range(6):
        for model in (whole_model, pipe.module):
            for name, p in model.named_parameters():
                p.requires_grad_(step % 2 == 0 or name[0] not in frozen)
        parts = [loss_fn(whole_model(part), of) / 2 for part, of in zip(x.chunk(2), y.chunk(2))]
        sum(parts).backward()
        plain.step()
        plain.zero_grad()
        same.append(math.isclose(pipe.train_step((x, y), loss_fn).item(), sum(parts).item(), rel_tol=1e-5))
    pipe.close()
    return same


def of_all_labels(**options):
    """Micro-batches have unlike numbers of labels that are not -100. Returns the loss with num_items_in_batch, and that of the whole batch, of
    which ranks along data have shares."""
    model, batch = made("llama"), batch_of("llama", 0)
    batch["labels"] = batch["labels"].masked_fill(torch.arange(8) * ROWS < torch.arange(ROWS)[:, None] * 8, -100)
    expected = model(**batch).loss.item()
    pipe = sluice.torch.Pipeline(model, sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=3, **options)
    counted = (batch["labels"][:, 1:] != -100).sum() / (pipe.micro_batches * pipe.data_ranks)
    found = pipe.train_step({"num_items_in_batch": counted} | _parts(batch, pipe.data_ranks)[pipe.data_rank]).item()
    pipe.close()
    return found, expected


def without_gradients():
    """A step that follows no forward_backward(). Returns the error, and the loss of a step after it."""
    pipe = sluice.torch.Pipeline(_linears(), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=1)
    text, x = None, torch.ones(2, 8)
    try:
        pipe.optimizer.step()
    except sluice.StateError as error:
        text = str(error)
    loss = pipe.train_step((x, x), loss_fn).item()
    pipe.close()
    return text, loss


def unseen(folder):
    """Ranks name folders of their own, which is refused, and then one. Returns the error, and whether there is a checkpoint."""
    pipe = sluice.torch.Pipeline(_linears(), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=1)
    text = None
    try:
        os.makedirs(f"{folder}/{RANK}", exist_ok=True)
        pipe.save(f"{folder}/{RANK}")
    except sluice.InvalidArgumentError as error:
        text = str(error)
    x = torch.ones(2, 8)
    pipe.train_step((x, x), loss_fn)
    made = os.path.isdir(pipe.save(f"{folder}/seen"))
    pipe.close()
    return text, made


def from_weights(folder, **options):
    """A model on the meta device gets its values from files. Returns whether they are those."""
    model = made("llama")
    if RANK == 0:
        model.save_pretrained(folder)
    expected = digests(model)
    _meet(**options)  # rank 0 has written the model then
    model = on_meta(MODELS["llama"])
    pipe = sluice.torch.Pipeline(model, sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=1, weights=folder, **options)
    found = digests(pipe)
    pipe.close()
    return len(found), all(expected[name] == digest for name, digest in found.items())


def read_by_transformers(folder):
    """Trains a step and saves with the model's configuration beside. Returns whether transformers reads the stage's values of the checkpoint."""
    pipe = sluice.torch.Pipeline(made("llama"), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=2)
    pipe.train_step(batch_of("llama", 0))
    where = pipe.save(folder, files={"config.json": [pipe.module.config.to_json_string().encode()]})
    read = transformers.AutoModelForCausalLM.from_pretrained(where).state_dict()
    same = [torch.equal(read[name], value) for name, value in pipe.state_dict().items()]
    pipe.close()
    return len(same), all(same)


def places(**options):
    """The blocks that a stage has, and the hooks that they have after its Pipeline."""
    pipe = sluice.torch.Pipeline(made("deep_gpt2"), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=4, **options)
    own = pipe.module.transformer.h
    pipe.train_step(batch_of("deep_gpt2", 0))
    found = [number for number, block in enumerate(own) if any(True for _ in block.parameters())]
    pipe.close()
    return found, sum(len(module._forward_pre_hooks) for block in own for module in block.modules())


def _meet(**options):
    sluice.torch.Pipeline(_linears(2 * SIZE), sluice.AdamW(), memory="4GiB", reserve="64MiB", micro_batches=1, **options).close()


def evaluated(name, **options):
    """A batch's loss without gradients, in both modes and after a step, on the stages and on one rank that wraps the whole model."""
    alone = RANK == 0
    model, twin = made(name), made(name)
    settings = sluice.SGD(lr=1e-2)
    pipe = sluice.torch.Pipeline(model, settings, memory="4GiB", micro_batches=3, **options)
    if alone:
        twin = nn.Sequential(*twin) if isinstance(twin, list) else twin
        twin, optimizer = sluice.torch.wrap(twin, settings, memory="4GiB", ranks=False)
    same = []
    for step, train in enumerate((False, True, False)):
        batch = batch_of(name, step)
        loss = None if isinstance(batch, dict) else loss_fn
        pipe.module.train(train)
        found = pipe.evaluate(batch, loss)
        same.append(not found.requires_grad)
        if alone:
            twin.train(train)
            with torch.no_grad():
                same.append(found.item() == sum(_loss_of(twin, name, part) / 3 for part in _parts(batch, 3)).item())
            for part in _parts(batch, 3):
                (_loss_of(twin, name, part) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        pipe.train_step(batch, loss)
    pipe.close()
    if name == "tied" and RANK == SIZE - 1:
        same.append(bool(pipe.module.get_input_embeddings()(torch.arange(8)).any()))
    if alone:
        sluice.torch.close(twin)
    return same
