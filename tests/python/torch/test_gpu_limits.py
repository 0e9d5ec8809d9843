"""A model that is wrapped on a GPU refuses what it does not do; and PyTorch may take its share there. The GPU is the fake one of the
tests."""

import contextlib
import copy
import gc
import types

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of
from support.wrapped_models import on_meta, same, units_of_modules, update, wrap

import sluice
import sluice.torch
from sluice.torch import _gpu
from sluice.torch._gpu import Account, Gpu, gpu_of


def refused(error, words, make=Layers, **options):
    model = make()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(error) as caught:
        wrap(model, "memory", **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_what_is_missing_is_said():
    refused(sluice.InvalidArgumentError, ["finds no GPU", "train on the CPU"], **GPU)
    refused(sluice.InvalidArgumentError, ["device is 'cuda'", "device_memory is None", "device_memory='24GiB'"], device="cuda")
    refused(sluice.InvalidArgumentError, ["updates is 'cpu'", "device_memory"], updates="cpu")
    with fake_gpu.shared():
        refused(sluice.InvalidArgumentError, ["updates is 'tpu'", "'gpu' or 'cpu'"], updates="tpu", **GPU)
        refused(sluice.BudgetError, ["fake GPU", "state less"], device_memory="2GiB", reserve="1MiB")
        refused(sluice.BudgetError, ["short by", "device_memory="], device_memory="2MiB", reserve="1KiB")
        with pytest.raises(sluice.InvalidArgumentError, match="all parameters on the meta device.*the GPU to which it is to move"):
            wrap(torch.nn.Linear(4, 4, device="meta"), "memory", **GPU)


class Placed:
    """Stands in for a model whose parameters are on GPUs, which PyTorch has none of here."""

    def __init__(self, **places):
        self.places = places

    def named_parameters(self):
        for name, place in self.places.items():
            yield name, types.SimpleNamespace(device=torch.device(place), is_meta=place == "meta")


def test_what_pytorch_may_take_is_for_all_models_of_a_gpu_and_ends_with_the_last(monkeypatch):
    total = 85899345920 - 3
    fractions = [0.9]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=total))
    gpu = Gpu(1, torch.device("cuda:1"))
    for begin in range(2):  # a second time after all have ended
        gpu.bound(16)
        gpu.bound(32)
        gpu.unbound(16)
        gpu.unbound(32)
        assert [int(total * fraction) for fraction in fractions[1 + 4 * begin : 4 + 4 * begin]] == [20, 52, 36]  # as PyTorch does
        assert fractions[4 + 4 * begin] == 0.9
    gpu.bound(total)
    assert fractions[-1] == 1.0
    gpu.unbound(total)


def test_models_that_are_elsewhere_are_refused(monkeypatch):
    def refused(words, model, *given):
        with pytest.raises(sluice.InvalidArgumentError) as caught:
            gpu_of(model, *given)
        assert all(word in str(caught.value) for word in words), caught.value

    refused(["'b' on cuda:1", "device_memory='24GiB'", "model.cpu()"], Placed(a="cpu", b="cuda:1"), None, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    refused(["'a' on cuda:0", "'c' on cuda:1", "model.to("], Placed(a="cuda:0", b="meta", c="cuda:1"), "1GiB", None)
    refused(["'a' on cpu", "device='cuda'", "train on the CPU"], Placed(a="cpu"), "1GiB", None)
    refused(["'a' on cpu", "device is 'cpu'"], Placed(a="cpu"), "1GiB", "cpu")
    refused(["'a' on cuda:0", "device is 'cuda' (GPU 1)"], Placed(a="cuda:0"), "1GiB", "cuda")
    refused(["device is 'gpu'", "'cuda:1'"], Placed(a="meta"), "1GiB", "gpu")
    assert gpu_of(Placed(a="cuda:0", b="meta"), "1GiB", None) == Gpu(0, torch.device("cuda:0"))
    assert gpu_of(Placed(b="meta"), "1GiB", "cuda") == Gpu(1, torch.device("cuda:1"))
    assert gpu_of(Placed(a="cpu", b="meta"), "1GiB", "cuda:0") == Gpu(0, torch.device("cuda:0"))
    assert gpu_of(Placed(a="cpu", b="meta"), None, None) is None


def test_a_rank_has_the_gpu_of_its_place_on_the_machine_unless_it_was_told_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def index(local, seen, chosen=0, several=True, device="cuda", **places):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        return gpu_of(Placed(**places or {"a": "meta"}), "1GiB", device, several).index

    assert index("1", 2) == 1
    assert index("3", 8, a="cpu") == 3
    assert index("3", 1) == 0, "the launcher gave it one"
    assert index("1", 8, chosen=5) == 5, "the script has chosen"
    assert index("1", 8, device="cuda:3") == 3
    assert index("1", 8, device=None, a="cuda:2") == 2
    assert index("1", 8, several=False) == 0
    assert index(None, 8) == 0
    with pytest.raises(sluice.InvalidArgumentError, match=r"device is 'cuda' \(GPU 1\), .* 'a' on cuda:0"):
        index("1", 2, a="cuda:0")


@pytest.mark.parametrize("disk", [None, ""])
def test_states_are_copies(disk, tmp_path):
    with fake_gpu.shared():
        torch.manual_seed(5)
        plain, model = Layers(), Layers()
        model.load_state_dict(plain.state_dict())
        model, _ = wrap(model, None, units=units_of_modules(model), disk=None if disk is None else tmp_path, **GPU)
        state = model.state_dict()
        assert same(list(state.values()), list(plain.state_dict().values())) and list(state) == list(plain.state_dict())
        assert state["head.weight"].data_ptr() == state["words.weight"].data_ptr(), "a tied parameter has one copy"
        assert [*model.blocks[1].state_dict(prefix="a.")] == [f"a.{name}" for name in plain.blocks[1].state_dict()]
        model.load_state_dict({name: value + 1 for name, value in state.items()})
        assert same(list(state.values()), list(plain.state_dict().values())), "it is a copy"
        model.blocks[0].load_state_dict(plain.blocks[0].state_dict())
        expected = {name: value if name.startswith("blocks.0.") else value + 1 for name, value in state.items()}
        assert same(list(model.state_dict().values()), list(expected.values()))
        sluice.torch.close(model)
        assert not {"state_dict", "load_state_dict"} & {name for module in model.modules() for name in vars(module)}


def test_a_state_without_room_is_refused():
    with fake_gpu.shared(memory=2 << 30):
        model = on_meta(lambda: torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]))
        given = {"place": "device", "device": "cuda", **GPU, "device_memory": "2GiB"}
        needed = sluice.torch.plan(model, sluice.SGD(lr=0.1), memory="6GiB", **given)["predicted_peak"]
        model, _ = wrap(model, optimizer=sluice.SGD(lr=0.1), disk=None, memory=needed + (32 << 20), **given)
        for use in (model.state_dict, sluice.torch.full_parameters(model).__enter__):
            with pytest.raises(sluice.BudgetError, match=r"of one module after another takes less\) takes 256 MiB more.*save\(folder\)"):
                use()
        with sluice.torch.full_parameters(model[0], writeback=False):
            pass
        sluice.torch.close(model, values=False)
        del use


@pytest.mark.filterwarnings("ignore:module forward hook:UserWarning")
def test_a_graph_of_cuda_may_be_captured_within_a_unit_alone():
    with fake_gpu.shared():
        torch.manual_seed(5)
        model, optimizer = wrap(Layers(), "memory", units=units_of_modules(Layers()), held_units=3, **GPU)
        update(optimizer, loss_of(model, 0))
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


@pytest.mark.parametrize("make", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_modules_that_write_in_their_calls_are_refused_at_the_step(make):
    with fake_gpu.shared():
        for given in ({}, GPU):
            model, optimizer = wrap(make(4, 8, max_norm=1.0), "memory", **given)
            model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
            says = "'weight' was written outside of `with sluice.torch.full_parameters"
            with pytest.raises(sluice.StateError, match=says) if given else contextlib.nullcontext():
                optimizer.step()
            sluice.torch.close(model, values=False)
            del model, optimizer


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
            with pytest.raises(sluice.StateError, match="'weight' was written outside of `with sluice.torch.full_parameters"):
                use()
        sluice.torch.close(model, values=False)
        del optimizer, use


def test_transforms_of_functions_are_refused_that_compute_gradients():
    with fake_gpu.shared():
        plain = torch.nn.Linear(4, 1)
        model, _ = wrap(copy.deepcopy(plain), "memory", **GPU)
        x = torch.randn(4)
        with pytest.raises(sluice.StateError, match="torch.autograd.grad"):
            torch.func.grad(lambda x: model(x).sum())(x)
        assert torch.equal(torch.func.vmap(model)(x.expand(2, 4)), torch.func.vmap(plain)(x.expand(2, 4)))
        assert torch.equal(torch.func.jvp(model, (x,), (x,))[1], torch.func.jvp(plain, (x,), (x,))[1])
        sluice.torch.close(model)


def test_a_model_ends_while_another_one_of_its_gpu_has_work_queued():
    with fake_gpu.shared(schedule="late"):
        made = [wrap(Layers(), "memory", device_facts=fake_gpu.FACTS, updates="gpu", **GPU) for _ in range(2)]
        for step in range(2):
            for model, optimizer in made:
                update(optimizer, loss_of(model, step))
        (first, _), (second, optimizer) = made
        sluice.torch.close(first, values=False)
        assert fake_gpu.take_misuses() == [], "the other one's work does not use what goes"
        loss_of(second, 2).backward()
        optimizer.step()
        sluice.torch.close(second)


def linears(count):
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(count)])


def test_what_pytorch_may_take_must_be_free():
    with fake_gpu.shared():
        given = {"device_facts": fake_gpu.FACTS, "optimizer": sluice.SGD(lr=0.1)}
        first, _ = wrap(linears(8), "device", **given, **GPU)  # 128 MiB
        before = fake_gpu.alive()
        refused(sluice.BudgetError, ["have 900 MiB of the memory of GPU 0 (reserve)", "MiB are free, besides the 10 MiB that", "give less device_memory"],
                device_memory="1GiB", reserve="900MiB", **given)  # fmt: skip
        gc.collect()
        assert fake_gpu.alive() == before
        second, _ = wrap(Layers(), "memory", device_memory="1GiB", reserve="700MiB", **given)
        sluice.torch.close(first, values=False)
        sluice.torch.close(second, values=False)


def test_a_reserve_counts_beside_cudas_libraries_and_those_of_other_models_and_without_parameters_that_will_move(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 << 20)
    monkeypatch.setattr(_gpu, "_bounds", {})
    libraries, gpu = Gpu(0, torch.device("cuda", 0)), Gpu(3, torch.device("meta"))
    model = torch.nn.Linear(1 << 18, 4, bias=False, device="meta")  # 4 MiB, which are the GPU's already
    for card, others, reserve, free, said in (
        (gpu, 0, 12, 8, None),
        (gpu, 0, 13, 8, r"13 MiB of the memory of GPU 3 \(reserve\), and 12 MiB are free, besides the 2 MiB"),
        (gpu, 5, 12, 8, "and 5 MiB that PyTorch may still take for other wrapped models, and 12 MiB are free"),
        (libraries, 0, 12, 172, None),
        (libraries, 0, 12, 171, "12 MiB of the memory of GPU 0 .reserve., CUDA's libraries 160 MiB, and 171 MiB are free"),
    ):
        monkeypatch.setattr(_gpu, "_bounds", {card.device: types.SimpleNamespace(untaken=lambda: others << 20)} if others else {})
        with pytest.raises(sluice.BudgetError, match=said) if said else contextlib.nullcontext():
            card.check_room(model if card is gpu else torch.nn.Linear(1, 1), reserve << 20, Account(free << 20, 2 << 20))


def test_a_model_that_is_on_the_gpu_already_is_told_what_that_takes(monkeypatch):
    with fake_gpu.shared(memory=320 << 20):
        given = {"device_memory": "300MiB", "reserve": "1MiB", "device_facts": fake_gpu.FACTS, "optimizer": sluice.SGD(lr=0.1)}
        first, _ = wrap(linears(8), "device", **given)  # 128 MiB
        monkeypatch.setattr(Gpu, "bytes_of", lambda gpu, model: 0)
        with pytest.raises(sluice.BudgetError, match="are free") as plainly:
            wrap(linears(8), "device", **given)
        assert "already" not in str(plainly.value)
        monkeypatch.setattr(Gpu, "bytes_of", lambda gpu, model: 128 << 20)
        with pytest.raises(sluice.BudgetError, match=r"are free.*on the GPU already, where they take 128 MiB .*keep the model on the CPU"):
            wrap(linears(8), "device", **given)
        sluice.torch.close(first, values=False)


def test_a_model_that_nobody_has_any_more_gives_its_memory_back_at_one_collection():
    with fake_gpu.shared():
        model, optimizer = wrap(Layers(), "memory", device_facts=fake_gpu.FACTS, **GPU)
        for step in range(2):
            update(optimizer, loss_of(model, step))
        del model, optimizer
        gc.collect()
        assert fake_gpu.alive() == []
