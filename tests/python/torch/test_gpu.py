"""Models that are wrapped on a GPU: the fake one of the tests, whose memory the CPU shares, so that PyTorch's CPU is the GPU. The
reference is the same model, wrapped on the CPU; nothing may differ by a bit."""

import ctypes
import contextlib
import gc
import math
import types

import numpy
import pytest
import torch
import torch.utils.checkpoint
from support import fake_gpu
from support.wrapped_models import language_loss, same, small_gpt2, units_of_modules, wrap

import sluice
import sluice.torch
from sluice.torch._gpu import Gpu, gpu_of
from sluice.torch._memory import FirstStepOnGpu

GPU = {"device_memory": "1GiB", "reserve": "64MiB"}


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Layers(torch.nn.Module):
    """Embeddings, blocks, a scale that no module of its own has, and a head that is tied."""

    def __init__(self, blocks=3, width=96, words=200, recompute=False):
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x * self.scale)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 200, (4, 17), generator=generator)
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def trained(make, loss, place, gpu=None, steps=4, accumulate=1, clip=None, optimizer=None, **options):
    """The losses, norms and parameters of a run, wrapped on the CPU, or on the GPU with the arguments `gpu`."""
    torch.manual_seed(5)
    model = make()
    given = {"units": units_of_modules(model), "held_units": 3} | options | (gpu or {})
    model, optimizer = wrap(model, place, optimizer, **given)
    seen = []
    for step in range(steps):
        for part in range(accumulate):
            found = loss(model, step * accumulate + part) / accumulate
            found.backward()
            seen.append(found.detach().clone())
        if clip is not None:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).clone())
        optimizer.step()
        optimizer.zero_grad()
    sluice.torch.close(model)
    return seen + [p.detach().clone() for p in model.parameters()]


def check_twin(make, loss, places=("device", "memory", "disk"), on_gpu_only=None, **options):
    expected = trained(make, loss, "memory", **options)
    for seed, place in enumerate(places):
        with fake_gpu.shared(seed=seed, schedule=("late", "random")[seed % 2]):
            assert same(trained(make, loss, place, GPU | (on_gpu_only or {}), **options), expected), place
            gc.collect()


def test_a_gpu_gives_the_bits_of_the_cpu():
    check_twin(Layers, loss_of)


def test_it_does_with_the_norm_clipped_over_micro_batches():
    check_twin(Layers, loss_of, places=["memory"], accumulate=2, clip=0.05)


def test_it_does_with_blocks_computed_again():
    check_twin(lambda: Layers(recompute=True), loss_of, places=["disk"])


@pytest.mark.parametrize("updates", ["cpu", "gpu"])
@pytest.mark.parametrize("at_once", [False, True])
def test_it_does_whatever_updates(updates, at_once):
    check_twin(Layers, loss_of, places=["memory"], update_in_backward=at_once, on_gpu_only={"updates": updates})


def test_it_does_with_updates_in_backward():
    check_twin(Layers, loss_of, places=["memory"], update_in_backward=True)


def test_a_gradient_that_is_not_finite_is_found_at_the_step():
    """The GPU leaves out the updates of backward, and nobody waits to learn of it before optimizer.step()."""
    with fake_gpu.shared(schedule="late"):
        model, optimizer = wrap(Layers(), "memory", update_in_backward=True, updates="gpu", **GPU)
        with sluice.torch.edit(model):
            before = [p.detach().clone() for p in model.parameters()]
        (loss_of(model, 0) * float("nan")).backward()
        with pytest.raises(sluice.NotFiniteError, match="is not finite; its unit was not updated"):
            optimizer.step()
        with sluice.torch.edit(model):
            assert same([p.detach().clone() for p in model.parameters()], before)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        sluice.torch.close(model)
        gc.collect()


def test_it_does_with_masters():
    check_twin(lambda: Layers().bfloat16(), loss_of, places=["memory"], state="bf16")


@pytest.mark.parametrize(
    "optimizer", [sluice.SGD(lr=0.1, momentum=0.9), sluice.Lion(lr=1e-3), sluice.Adam(lr=1e-3), sluice.Adafactor(lr=1e-3)]
)
def test_it_does_with_each_optimizer(optimizer):
    check_twin(Layers, loss_of, places=["memory"], optimizer=optimizer, steps=2)


def least(plan_with, most):
    """The least budget below `most`, in MiB, for which there is a plan."""
    too_small, enough = 0, most
    while enough - too_small > 1:
        between = (enough + too_small) // 2
        try:
            plan_with(between << 20)
            enough = between
        except sluice.BudgetError:
            too_small = between
    return enough


def test_it_does_with_budgets_for_a_part_on_each_tier(tmp_path):
    def make():
        return Layers(blocks=6, width=384)

    def plan(device_memory=4 << 30, memory=6 << 30):
        given = {"units": units_of_modules(make()), "held_units": 3, "disk": tmp_path, "reserve": "64MiB", "device_facts": fake_gpu.FACTS}
        return sluice.torch.plan(make(), sluice.AdamW(lr=1e-3), device_memory=device_memory, memory=memory, **given)

    expected = trained(make, loss_of, "memory", steps=2)
    with fake_gpu.shared():
        most = sum(plan()["bytes"]["device"].values()) >> 20
        on_gpu = (least(plan, most) + most) // 2 << 20
        peak = plan(on_gpu)["predicted_peak"] >> 20
        on_host = (least(lambda memory: plan(on_gpu, memory), peak) + peak) // 2 << 20
        units = plan(on_gpu, on_host)["units"]
        assert {unit[part] for unit in units for part in ("parameters", "gradient", "state")} == {"device", "memory", "disk"}
        gpu = GPU | {"device_memory": on_gpu, "memory": on_host, "disk": tmp_path}
        assert same(trained(make, loss_of, None, gpu, steps=2), expected)
        gc.collect()


def test_muon_has_them_with_its_state_on_disk():
    """It reads chunks of state several times, and the CPU computes with them on a thread of its own."""
    check_twin(small_gpt2, language_loss, places=["disk"], optimizer=sluice.Muon(lr=1e-2), steps=4)


def test_gpt2_of_transformers_has_the_bits_of_the_cpu():
    check_twin(small_gpt2, language_loss, places=["disk"], steps=2)


def test_parameters_that_no_hook_announces_are_found():
    """The scale is used after the last block, when others have its room: the first step finds it, and the others bring it in."""
    names = [name for name, _ in Layers().named_parameters()]
    units = {"scale": ["scale"]} | {name: [name] for name in names if name != "scale"}
    check_twin(Layers, loss_of, places=["memory"], units=units, held_units=4, steps=3)


class TakesAnotherWay(Layers):
    """A model that uses its scale, which nothing announces, in one of two places, each time through a view that it makes before."""

    early = False

    def forward(self, ids):
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            if number == (1 if self.early else 2):
                scale = self.scale.view(-1)
            x = block(x)
        return self.head(x * scale)


def loss_of_another_way(model, step):
    model.early = step % 2 == 1
    return loss_of(model, step)


def test_what_a_call_uses_that_the_first_one_did_not_is_brought_in():
    units = {name: [name] for name, _ in TakesAnotherWay().named_parameters()}
    check_twin(TakesAnotherWay, loss_of_another_way, places=["memory"], units=units, held_units=4, steps=5)


class UsesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale  # and not save_for_backward()
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, gradient.sum(0)


def test_a_backward_pass_finds_parameters_that_autograd_does_not_know_of():
    class Kept(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.scale = torch.nn.Parameter(torch.linspace(1, 2, 8))

        def forward(self, x):
            return self.last(UsesInBackward.apply(self.first(x), self.scale))

    def loss(model, step):
        return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()

    units = {name: [name] for name, _ in Kept().named_parameters()}
    check_twin(Kept, loss, places=["memory"], units=units, held_units=3, steps=3)


class Fails(Layers):
    fails = False

    def forward(self, ids):
        if self.fails:
            self.words(ids)
            raise ValueError("not now")
        return super().forward(ids)


def loss_after_a_failure(model, step):
    model.fails = True
    with pytest.raises(ValueError):
        loss_of(model, step)
    model.fails = False
    return loss_of(model, step)


def test_a_call_that_failed_is_looked_at_again():
    units = {name: [name] for name, _ in Fails().named_parameters()}
    check_twin(Fails, loss_after_a_failure, places=["memory"], units=units, held_units=4, steps=3)


def test_edits_read_and_write_parameters():
    with fake_gpu.shared():
        torch.manual_seed(5)
        plain, model = Layers(), Layers()
        model.load_state_dict(plain.state_dict())
        model, _ = wrap(model, "disk", units=units_of_modules(model), **GPU)
        with sluice.torch.edit(model):
            assert same([p.clone() for p in model.parameters()], list(plain.parameters()))
            model.scale.detach().mul_(2)
            state = {name: value.clone() for name, value in model.state_dict().items()}
        plain.scale.data.mul_(2)
        assert same(list(state.values()), list(plain.state_dict().values()))
        with torch.no_grad():
            assert torch.equal(loss_of(model, 0), loss_of(plain, 0))
        sluice.torch.close(model)
        assert same(list(model.parameters()), list(plain.parameters()))
        gc.collect()


class Own(torch.nn.Parameter):
    pass


def with_parameters_of_a_class_of_their_own():
    model = Layers()
    model.scale = Own(torch.linspace(0.5, 1.5, 96))
    return model


def test_parameters_may_be_of_a_class_of_their_own():
    units = {name: [name] for name, _ in Layers().named_parameters()}
    check_twin(with_parameters_of_a_class_of_their_own, loss_of, places=["memory"], units=units, held_units=4, steps=3)
    with fake_gpu.shared():
        plain = with_parameters_of_a_class_of_their_own()
        model, _ = wrap(with_parameters_of_a_class_of_their_own(), "memory", units=units, held_units=2, **GPU)
        with sluice.torch.edit(model):
            for p in model.parameters():
                p.detach().sum()
            assert torch.equal(model.scale.detach(), plain.scale.detach()) and type(model.scale) is Own
            model.scale.detach().mul_(2)
        sluice.torch.close(model)
        assert torch.equal(model.scale, 2 * plain.scale)
        gc.collect()


def test_a_model_on_the_meta_device_gets_first_values_on_the_gpu():
    with fake_gpu.shared():
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 4))
        torch.manual_seed(7)
        model, _ = wrap(model, "disk", device="cuda", **GPU)
        torch.manual_seed(7)
        plain = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 4))
        x = torch.randn(5, 8)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        sluice.torch.close(model, values=False)
        gc.collect()


def test_views_that_outlive_a_closed_model_keep_the_memory():
    with fake_gpu.shared():
        model, _ = wrap(Layers(), "device", **GPU)
        with sluice.torch.edit(model):
            view = model.scale.detach()
        sluice.torch.close(model)
        gc.collect()
        assert fake_gpu.alive() != []
        del view, model, _
        gc.collect()
        assert fake_gpu.alive() == []


# ---- what is refused ----


def refused(error, words, make=Layers, **options):
    model = make()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(error) as caught:
        wrap(model, "memory", **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_what_is_missing_is_said():
    refused(sluice.InvalidArgumentError, ["finds no GPU", "train on the CPU"], **GPU)
    refused(sluice.InvalidArgumentError, ["device is 'cuda'", "device_memory='24GiB'"], device="cuda")
    refused(sluice.InvalidArgumentError, ["updates is 'cpu'", "device_memory"], updates="cpu")
    with fake_gpu.shared():
        refused(sluice.InvalidArgumentError, ["updates is 'tpu'", "'gpu' or 'cpu'"], updates="tpu", **GPU)
        refused(sluice.InvalidArgumentError, ["reserve='6GiB'", "sample_batch="], reserve=None, device_memory="1GiB")
        refused(sluice.BudgetError, ["fake GPU", "state less"], device_memory="2GiB", reserve="1MiB")
        refused(sluice.BudgetError, ["short by", "device_memory="], device_memory="2MiB", reserve="1KiB")

        def on_meta():
            with torch.device("meta"):
                return torch.nn.Linear(4, 4)

        with pytest.raises(sluice.InvalidArgumentError, match="say which GPU"):
            wrap(on_meta(), "memory", **GPU)


class Placed:
    """Stands in for a model whose parameters are on GPUs, which PyTorch has none of here."""

    def __init__(self, **places):
        self.places = places

    def named_parameters(self):
        for name, place in self.places.items():
            yield name, types.SimpleNamespace(device=torch.device(place), is_meta=place == "meta")


def test_what_pytorch_may_take_is_for_all_models_of_a_gpu_and_ends_with_the_last(monkeypatch):
    fractions = [0.9]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=64))
    gpu = Gpu(1, torch.device("cuda:1"))
    for begin in range(2):  # a second time after all have ended
        gpu.bound(16)
        gpu.bound(32)
        gpu.unbound(16)
        gpu.unbound(32)
        assert fractions == [0.9, *([20 / 64, 52 / 64, 36 / 64, 0.9] * (begin + 1))]
    gpu.bound(128)
    assert fractions[-1] == 1.0
    gpu.unbound(128)


def test_models_that_are_elsewhere_are_refused(monkeypatch):
    def refused(words, model, *given):
        with pytest.raises(sluice.InvalidArgumentError) as caught:
            gpu_of(model, *given)
        assert all(word in str(caught.value) for word in words), caught.value

    refused(["'b' is on cuda:1", "device_memory='24GiB'", "model.cpu()"], Placed(a="cpu", b="cuda:1"), None, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    refused(["'a' is on cuda:0", "'c' on cuda:1", "model.to("], Placed(a="cuda:0", b="meta", c="cuda:1"), "1GiB", None)
    refused(["'a' is on cpu", "device='cuda'", "train on the CPU"], Placed(a="cpu"), "1GiB", None)
    refused(["'a' is on cpu", "device is 'cpu'"], Placed(a="cpu"), "1GiB", "cpu")
    refused(["'a' is on cuda:0", "device is 'cuda'"], Placed(a="cuda:0"), "1GiB", "cuda")
    refused(["device is 'gpu'", "'cuda:1'"], Placed(a="meta"), "1GiB", "gpu")
    assert gpu_of(Placed(a="cuda:0", b="meta"), "1GiB", None) == (0, torch.device("cuda:0"))
    assert gpu_of(Placed(b="meta"), "1GiB", "cuda") == (1, torch.device("cuda:1"))
    assert gpu_of(Placed(a="cpu", b="meta"), "1GiB", "cuda:0") == (0, torch.device("cuda:0"))
    assert gpu_of(Placed(a="cpu", b="meta"), None, None) is None


def test_what_pytorch_took_of_a_gpu_is_told_after_the_first_step():
    class Card:
        peaks = [5 << 20, 7 << 20]

        def begin_peak(self):
            self.peaks = self.peaks[-1:]

        def peak(self):
            return self.peaks[0]

    step = FirstStepOnGpu(Card(), 9 << 20, 3 << 20)
    assert step.as_dict() == {"peak": 3 << 20, "reserve": 9 << 20, "measured": None}
    step.note(1 << 40)
    step.end()
    assert step.as_dict() == {"peak": 3 << 20, "reserve": 9 << 20, "measured": 7 << 20}
    with fake_gpu.shared():
        model, optimizer = wrap(torch.nn.Linear(8, 8), "memory", device="cuda", **GPU)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        told = sluice.torch.engine_of(model).plan()["pytorch"]
        assert told == {"peak": None, "reserve": 64 << 20, "measured": None}  # the CPU stands in for PyTorch's part
        sluice.torch.close(model)
        del optimizer
        gc.collect()


@pytest.mark.parametrize("disk", [None, ""])
def test_states_outside_of_edits_are_copies(disk, tmp_path):
    with fake_gpu.shared():
        torch.manual_seed(5)
        plain, model = Layers(), Layers()
        model.load_state_dict(plain.state_dict())
        model, _ = wrap(model, None, units=units_of_modules(model), disk=None if disk is None else tmp_path, **GPU)
        state = model.state_dict()
        assert same(list(state.values()), list(plain.state_dict().values())) and list(state) == list(plain.state_dict())
        assert state["head.weight"] is state["words.weight"], "a tied parameter has one copy"
        assert [*model.blocks[1].state_dict(prefix="a.")] == [f"a.{name}" for name in plain.blocks[1].state_dict()]
        model.load_state_dict({name: value + 1 for name, value in state.items()})
        assert same(list(state.values()), list(plain.state_dict().values())), "it is a copy"
        model.blocks[0].load_state_dict(plain.blocks[0].state_dict())
        expected = {name: value if name.startswith("blocks.0.") else value + 1 for name, value in state.items()}
        assert same(list(model.state_dict().values()), list(expected.values()))
        sluice.torch.close(model)
        assert not {"state_dict", "load_state_dict"} & {name for module in model.modules() for name in vars(module)}
        gc.collect()


def test_a_state_without_room_is_refused():
    with fake_gpu.shared(memory=2 << 30):
        with torch.device("meta"):
            model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)])
        given = {"place": "device", "device": "cuda", **GPU, "device_memory": "2GiB"}
        needed = sluice.torch.plan(model, sluice.SGD(lr=0.1), memory="6GiB", **given)["predicted_peak"]
        model, _ = wrap(model, optimizer=sluice.SGD(lr=0.1), disk=None, memory=needed + (16 << 20), **given)
        with pytest.raises(sluice.BudgetError, match=r"the model's state_dict takes 256 MiB more.*save\(folder\)"):
            model.state_dict()
        sluice.torch.close(model, values=False)
        gc.collect()


@pytest.mark.filterwarnings("ignore:module forward hook:UserWarning")
def test_a_graph_of_cuda_may_be_captured_within_a_unit_alone():
    with fake_gpu.shared():
        torch.manual_seed(5)
        model, optimizer = wrap(Layers(), "memory", units=units_of_modules(Layers()), held_units=3, **GPU)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            expected = loss_of(model, 1)
        with fake_gpu.capturing(), pytest.raises(sluice.StateError, match=r"unit '\w+' is acquired while .* captured into a graph"):
            loss_of(model, 1)
        with torch.no_grad(), contextlib.ExitStack() as graph:
            model.blocks[1].up.register_forward_pre_hook(lambda *_: graph.enter_context(fake_gpu.capturing()))
            model.blocks[1].up.register_forward_hook(lambda *_: graph.close())
            assert torch.equal(loss_of(model, 1), expected), "what is computed with units that are held may be captured"
        sluice.torch.close(model)
        del optimizer
        gc.collect()


def test_writes_in_a_call_of_the_model_are_refused():
    class Writes(torch.nn.Linear):
        def forward(self, x):
            self.weight.data.clamp_(-1, 1)
            return super().forward(x)

    with fake_gpu.shared():
        model, _ = wrap(Writes(8, 8), "memory", **GPU)
        with pytest.raises(sluice.StateError, match="'weight' is written by aten.clamp_"):
            model(torch.randn(2, 8))
        sluice.torch.close(model)
        gc.collect()


def test_operations_on_more_units_than_may_be_held_are_refused():
    class All(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))

        def forward(self):
            return torch.cat([part.weight for part in self.parts]).sum()

    with fake_gpu.shared():
        model = All()
        model, _ = wrap(model, "memory", units=units_of_modules(model), **GPU)
        with pytest.raises(sluice.StateError, match="aten.cat.default needs parameters of more units at once.*larger held_units"):
            model()
        sluice.torch.close(model)
        gc.collect()


USES = {
    "an operation": lambda p: p * 2,
    "several": lambda p: torch.cat([p, p]),
    "a function of modules": lambda p: torch.nn.functional.linear(torch.ones(2, 8), p),
    "a view": lambda p: p.detach(),
    "data": lambda p: p.data,
    "values": lambda p: p.tolist(),
    "NumPy": lambda p: numpy.asarray(p),
    "DLPack": lambda p: torch.from_dlpack(p),
    "a copy into it": lambda p: p.copy_(torch.ones(8, 8)),
    "a rule": torch.nn.init.ones_,
    "shared memory": lambda p: p.share_memory_(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses_outside_of_calls_are_refused(use):
    with fake_gpu.shared():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model, optimizer = wrap(model, "memory", units={"one": ["0"], "other": ["1"]}, **GPU)
        x = torch.randn(2, 8)
        for _ in range(2):
            with torch.no_grad(), pytest.raises(sluice.StateError, match="'1.weight' is used by .*its unit 'other'.*edit"):
                use(model[1].weight)
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad(), sluice.torch.edit(model):
            assert model[0].weight.isfinite().all()
        with torch.no_grad(), pytest.raises(sluice.StateError, match="'1.weight' is used by"):
            use(model[1].weight)
        sluice.torch.close(model)
        assert type(model[1].weight) is torch.nn.Parameter
        del optimizer
        gc.collect()


def test_what_asks_for_no_values_works_anywhere():
    with fake_gpu.shared():
        model, optimizer = wrap(torch.nn.Linear(8, 4), "memory", **GPU)
        p = model.weight
        assert (p.shape, p.dtype, p.numel(), p.stride(), p.device.type) == ((4, 8), torch.float32, 32, (8, 1), "cpu")
        assert isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad and not p.is_meta and p.grad is None
        assert [torch.zeros_like(p).shape, p.new_ones(3).tolist(), "(4, 8)" in repr(p)] == [(4, 8), [1, 1, 1], True]
        assert all(p is own for p, own in zip(model.parameters(), [model.weight, model.bias], strict=True))
        assert torch.nn.utils.parameters_to_vector([torch.zeros(2)]).shape == (2,)
        optimizer.zero_grad()
        model.requires_grad_(False).requires_grad_(True)
        sluice.torch.close(model)
        del optimizer
        gc.collect()


def test_what_does_not_ask_pytorch_finds_nan():
    with fake_gpu.shared():
        model, _ = wrap(torch.nn.Linear(8, 8), "device", **GPU)
        with torch.no_grad():
            model(torch.randn(2, 8))
        p = model.weight
        found = (ctypes.c_float * 64).from_address(p.data_ptr())
        assert all(math.isnan(x) for x in found)
        sluice.torch.close(model, values=False)
        gc.collect()


class WritesLater(torch.nn.Linear):
    writes = False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.weight.copy_(torch.ones(8, 8))
        return super().forward(x)


def test_writes_in_later_calls_are_found():
    with fake_gpu.shared():
        model, optimizer = wrap(WritesLater(8, 8), "device", **GPU)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        model.writes = True
        model(torch.randn(2, 8)).sum().backward()
        for use in (lambda: model(torch.randn(2, 8)), optimizer.step):
            with pytest.raises(sluice.StateError, match="'weight' was written outside of `with sluice.torch.edit"):
                use()
        sluice.torch.close(model, values=False)
        del optimizer, use
        gc.collect()


def test_transforms_of_functions_are_refused():
    with fake_gpu.shared():
        model, _ = wrap(torch.nn.Linear(4, 1), "memory", **GPU)
        with pytest.raises(sluice.StateError, match="torch.autograd.grad"):
            torch.func.grad(lambda x: model(x).sum())(torch.randn(4))
        sluice.torch.close(model)
        gc.collect()
