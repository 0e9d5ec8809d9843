"""The stages of a pipeline are threads of one process in these tests, on fake GPUs. A process of support.rank_pool calls these
functions. Results are of JSON's types."""

import gc
import os
import signal
import threading
import time

import torch
from support import fake_gpu, over_pipelines
from support.over_pipelines import ON_GPU, batch_of, digests, gpt2, loss_fn, made, whole  # noqa: F401: which the process calls
from support.wrapped_models import on_meta, update
from torch import nn

import sluice
import sluice.torch


def in_one_process(called, gpus=(0, 1), seed=0, schedule="random", **given):
    """Calls a function of this module, or of over_pipelines, whose stages are on the GPUs with these numbers."""
    function = globals().get(called) or getattr(over_pipelines, called)
    on_gpu = {**ON_GPU, "device": None, "devices": [f"cuda:{number}" for number in gpus]}
    with fake_gpu.shared(seed=seed, schedule=schedule, devices=2 if len(gpus) == 1 else len(gpus)):
        return function(**on_gpu | given)


def _pipe(model, settings=None, **options):
    return sluice.torch.Pipeline(model, settings or sluice.AdamW(lr=1e-2), **{"memory": "4GiB", "reserve": "64MiB", "micro_batches": 2} | options)


def _linears(count=4):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


X = torch.arange(48.0).view(6, 8) / 48


def _step(pipe):
    return pipe.train_step((X, X), loss_fn).item()


# ---- what users have of it ----


def _same_states(one, other):
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    return [torch.equal(value, other["state"][i][key]) for i, arrays in one["state"].items() for key, value in arrays.items()]


def states(**options):
    """The optimizer's state_dict is that of the model in one part, and another pipeline goes on from it with the bits of the first one."""
    model, other, twin = made("gpt2"), made("gpt2"), made("gpt2")
    given = [{"params": (p for name, p in model.named_parameters() if "ln" in name), "lr": 1e-3}]
    pipe = _pipe(model, micro_batches=1, param_groups=given, **options)
    given = [{"params": [p for name, p in twin.named_parameters() if "ln" in name], "lr": 1e-3}]
    twin, optimizer = sluice.torch.wrap(twin, sluice.AdamW(lr=1e-2), memory="4GiB", reserve="64MiB", param_groups=given, ranks=False)
    for step in range(2):
        pipe.train_step(batch_of("gpt2", step))
        update(optimizer, twin(**batch_of("gpt2", step), use_cache=False).loss)
    state = pipe.optimizer.state_dict()
    same = _same_states(optimizer.state_dict(), state)
    second = _pipe(other, micro_batches=1, param_groups=[{"params": [n for n, _ in other.named_parameters() if "ln" in n]}], **options)
    with sluice.torch.full_parameters(other), sluice.torch.full_parameters(model), torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    second.optimizer.load_state_dict(state)
    rates = [group["lr"] for group in second.optimizer.param_groups]
    losses = [each.train_step(batch_of("gpt2", 2)).item() for each in (pipe, second)]
    values = [digests(each) for each in (pipe, second)]
    with_unknown = {**state, "state": {1000: state["state"][0]}}
    text = _error_of(lambda: second.optimizer.load_state_dict(with_unknown))
    for each in (pipe, second):
        each.close()
    sluice.torch.close(twin)
    return len(same), all(same), rates, losses[0] == losses[1], values[0] == values[1], text


def kept(**options):
    """The model is whole while its layers are stages, and afterwards."""
    model = gpt2(tied=True)
    hooked = []
    model.get_input_embeddings().register_forward_hook(lambda *_: hooked.append(1))
    modules, parameters = list(model.modules()), list(model.parameters())
    before, state = digests(model), [[*vars(module)] for module in model.modules()]
    pipe = _pipe(model, sluice.SGD(lr=0.0), micro_batches=2, **options)
    hooked.clear()
    pipe.train_step(batch_of("tied", 0))
    facts = {
        "modules": list(model.modules()) == modules and pipe.module is model,
        "parameters": [*map(id, model.parameters())] == [*map(id, parameters)] == [id(p) for p in pipe.optimizer.param_groups[0]["params"]],
        "values": digests(pipe) == before,
        "names": list(pipe.state_dict()) == list(before),
        "places": [sluice.torch.engine_of(module).plan()["device"] > 0 for module in pipe.modules],
        "hooks": len(hooked),
        "refused": [_error_of(use) for use in (
            lambda: model(**batch_of("tied", 0)), lambda: sluice.torch.engine_of(model), lambda: model.save_pretrained("/none"),
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if pipe.forward_backward(batch_of("tied", 1)) > 0 else 0,
            lambda: model.to(torch.bfloat16),
        )],
    }  # fmt: skip
    pipe.close()
    pipe.close()
    facts["closed"] = [digests(model) == before, [[*vars(module)] for module in model.modules()] == state, fake_gpu.alive()]
    hooked.clear()
    model(**batch_of("tied", 0))
    return {**facts, "hooks_after": len(hooked), "after": _error_of(lambda: pipe.evaluate(batch_of("tied", 0)))}


class _Notes(nn.Module):
    """A layer with a container's flag, and what PyTorch has for each thread."""

    def __init__(self):
        super().__init__()
        self.own, self.seen = nn.Linear(8, 8), []

    def forward(self, x):
        self.seen.append([self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")])
        return self.own(x)


def modes(**options):
    """Returns the caller's modes that each layer sees."""
    model = nn.Sequential(_Notes(), _Notes())
    pipe, loss = _pipe(model, micro_batches=1, **options), lambda output, targets: (output.float() - targets).square().mean()
    pipe.forward_backward((X, X), loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.forward_backward((X, X), loss)
    model.eval()
    pipe.evaluate((X, X), loss)
    flags = [module.training for module in pipe.modules]
    with torch.inference_mode():
        pipe.evaluate((X, X), loss)
    seen = [layer.seen for layer in model]
    pipe.close()
    return seen, flags


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


def compiled(**options):
    """The losses of blocks that were compiled, by either way, and of blocks that were not."""

    def losses(way):
        torch.manual_seed(3)
        blocks = [_Block() for _ in range(3)]
        if way == "method":
            for block in blocks:
                block.compile(backend="eager")
        pipe = _pipe([torch.compile(block, backend="eager") if way == "function" else block for block in blocks], **options)
        found = [_step(pipe) for _ in range(2)]
        pipe.close()
        return found

    return [losses(way) for way in ("none", "function", "method")]


def drawn(**options):
    """Stages draw random numbers of their own, whichever comes first, and stage 0 those of the process."""

    def losses(slow):
        torch.manual_seed(5)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)]

        def slowed(*_):
            time.sleep(0.05)

        layers[slow].register_forward_pre_hook(slowed)
        pipe = _pipe(layers, micro_batches=3, **options)
        before = torch.get_rng_state()
        found = [_step(pipe) for _ in range(2)]
        moved = not torch.equal(before, torch.get_rng_state())
        expected = torch.Generator()
        expected.set_state(before)
        for _ in range(6):  # stage 0's masks alone
            torch.empty(2, 8).bernoulli_(0.5, generator=expected)
        same = torch.equal(expected.get_state(), torch.get_rng_state())
        pipe.close()
        return found, moved, same

    first, second = losses(0), losses(2)
    return first == second, first[0][0] != first[0][1], first[1:]


# ---- errors ----


def _error_of(use):
    try:
        use()
    except (sluice.Error, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Fails(nn.Linear):
    """Raises in one of its calls."""

    left = 8

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise ValueError("the data of this layer are bad")
        return super().forward(x)


def fails(stage, **options):
    """The error of a layer in the third step, and of the step after it, and what is left on the GPUs then."""
    layers = [_Fails(8, 8) if number == stage else nn.Linear(8, 8) for number in range(3)]
    pipe, begun = _pipe(layers, micro_batches=3, **options), time.monotonic()
    texts = [_error_of(lambda: _step(pipe)) for _ in range(4)]
    seconds = time.monotonic() - begun
    pipe.close(values=False)
    return texts, seconds, fake_gpu.alive()


class _Draws(nn.Linear):
    """Its rule for first values raises, where it has memory for them."""

    def reset_parameters(self):
        if not self.weight.is_meta:
            time.sleep(1)  # the other stage has moved in
            raise ValueError("there is no such rule")


def undone(**options):
    """Where a Pipeline cannot be made, the model is as it was, and can be wrapped."""
    model, texts = made("tied"), []
    before, state = digests(model), [[*vars(module)] for module in model.modules()]
    for more in ({"device_memory": "8MiB"}, {"memory": "1MiB"}, {"stages": "0-3"}, {"state": "none"}):
        texts.append(_error_of(lambda more=more: _pipe(model, **options | more)))
    with_rule = nn.Sequential(nn.Linear(8, 8), _Draws(8, 8, device="meta"))
    kept = digests(with_rule[0])
    texts.append(_error_of(lambda: _pipe(with_rule, **options)))
    same = digests(model) == before and [[*vars(module)] for module in model.modules()] == state
    same = same and digests(with_rule[0]) == kept and not hasattr(with_rule[0].weight, "_sluice") and with_rule[1].weight.is_meta
    pipe = _pipe(model, **options)
    loss = pipe.train_step(batch_of("tied", 0)).item()
    pipe.close()
    return texts, same, loss > 0


def on_devices(devices, **options):
    """The error for these devices."""
    model = options.pop("model", None)
    layers = _linears() if model is None else made(model)
    return _error_of(lambda: _pipe(layers, **options | {"devices": devices}).close())


def saved_apart(folder, **options):
    """A stage that cannot save ends the call on all."""
    pipe = _pipe(_linears(), **options)
    _step(pipe)
    part, begun = pipe._every[1], time.monotonic()
    part._check_open = lambda: (_ for _ in ()).throw(OSError("there is no room"))
    text = None
    try:
        pipe.save(folder)
    except OSError as error:
        text = str(error)
    del part._check_open
    pipe.close(values=False)
    return text, time.monotonic() - begun


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)


class _Interrupts(nn.Linear):
    """Ctrl-C comes so often in its fifth call."""

    times = calls = 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.times if self.calls == 5 else 0):
            _interrupt()
        return super().forward(x)


def interrupted(times, **options):
    """The losses of four steps of three calls each, or how they ended. No thread stays."""
    torch.manual_seed(0)
    layers, threads, told = [nn.Linear(8, 8), _Interrupts(8, 8)], threading.active_count(), []
    layers[1].times = times
    pipe = _pipe(layers, micro_batches=3, **options)
    for _ in range(4):
        try:
            told.append(pipe.train_step((X, X), loss_fn, clip=1.0).item())
        except KeyboardInterrupt:
            told.append("interrupted")
    pipe.close()
    assert threading.active_count() <= threads  # others may have ended meanwhile
    return told


class _InterruptsAtFirst(nn.Linear):
    """Ctrl-C comes where it gets its first values for the first time."""

    came = False

    def reset_parameters(self):
        super().reset_parameters()
        if not self.weight.is_meta and not self.came:
            self.came = True
            _interrupt()


def interrupted_at_first(**options):
    """Returns what is left of a Pipeline that Ctrl-C ended while it was made, of the model and else; and whether the model trains then."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), _InterruptsAtFirst(8, 8)))
    threads, left = threading.active_count(), None
    try:
        _pipe(model, **options)
    except KeyboardInterrupt:
        left = [hasattr(p, "_sluice") or p.is_meta for p in model.parameters()]
    gc.collect()
    beside = [fake_gpu.alive(), max(0, threading.active_count() - threads)]
    pipe = _pipe(model, **options)
    trains = _step(pipe) > 0
    pipe.close()
    return left, beside, trains


# ---- what stages have ----


def budgets(folder, **options):
    """Returns how much each stage may have of the memory that the process does not hold yet, and of the disk, in MiB."""
    has = over_pipelines._resident()
    pipe = _pipe(_linears(), **options | {"memory": has + (1200 << 20), "disk": f"{folder}:64MiB"})
    plans = [sluice.torch.engine_of(module).plan() for module in pipe.modules]
    pipe.close()
    return [(plan["budget"]["memory"] - has) / (1 << 20) for plan in plans], [plan["budget"]["disk"] >> 20 for plan in plans]


def dropped(**options):
    """Lists what is on the GPUs after a Pipeline and its model are gone that nobody has closed, and counts the threads that remain."""
    before = threading.active_count()
    pipe = _pipe(made("gpt2"), **options)
    pipe.train_step(batch_of("gpt2", 0))
    alive = len(fake_gpu.alive())
    del pipe
    gc.collect()
    for _ in range(50):
        if threading.active_count() == before:
            break
        time.sleep(0.1)
    return alive > 0, fake_gpu.alive(), threading.active_count() - before


class _Lacks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 1 has too little")


class _LacksMemory(nn.Linear):
    def forward(self, x):
        return _Lacks.apply(super().forward(x))


def lacks(stage, **options):
    """The error where PyTorch has no memory in a stage's backward pass."""
    pipe = _pipe([_LacksMemory(8, 8) if number == stage else nn.Linear(8, 8) for number in range(2)], **options)
    text = _error_of(lambda: _step(pipe))
    pipe.close(values=False)
    return text


def within(**options):
    """The error of a loss_fn that uses the Pipeline which calls it."""
    pipe = _pipe(_linears(), **options)
    texts = []

    def loss(output, targets):
        texts.append(_error_of(lambda: pipe.evaluate((X, X), loss_fn)))
        return loss_fn(output, targets)

    pipe.evaluate((X, X), loss)
    pipe.close()
    return texts


def lives_on(**options):
    """Returns what is left of a model: hooks that come and go, values that are loaded, values after an error of a stage, and what is
    closed by the model alone."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), *_linears(3))
    pipe, called = _pipe(model, **options), []
    first = model[0].register_forward_hook(lambda *_: called.append("first"))
    _step(pipe)
    first.remove()
    before = len(called)
    _step(pipe)
    hooked = before, len(called) - before
    values = {name: value.clone() for name, value in pipe.state_dict().items()}
    _step(pipe)
    model.load_state_dict(values)
    loaded = all(torch.equal(value, values[name]) for name, value in pipe.state_dict().items())
    text = _error_of(lambda: pipe.train_step((X[:, :3], X), loss_fn))
    pipe.close()
    same = all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    del pipe
    _pipe(model, **options)
    sluice.torch.close(model)
    return hooked, loaded, text, same, all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
