"""Parameters whose unit is not on the GPU: what uses them in calls and backward passes finds their values, and elsewhere it is an error.
The GPU is the fake one of the tests."""

import copy
import ctypes
import gc
import io
import pickle

import numpy
import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU
from support.wrapped_models import units_of_modules, wrap

import sluice
import sluice.torch

F = torch.func

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
    "a copy of it": copy.copy,
    "a deep copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "a file": lambda p: torch.save({"p": p}, io.BytesIO()),
    "an address": lambda p: p.data_ptr(),
    "a storage": lambda p: p.untyped_storage(),
    "a storage with a type": lambda p: p.storage(),
    "another class": lambda p: p.as_subclass(torch.Tensor),
    "DLPack's method": lambda p: p.__dlpack__(),
    "NumPy by DLPack": numpy.from_dlpack,
    "CUDA's interface of arrays": lambda p: p.__cuda_array_interface__,
    "vmap": lambda p: F.vmap(lambda row: row * 2)(p),
    "vmap of a vmap": lambda p: F.vmap(F.vmap(lambda x: x * 2))({"p": p}["p"]),
    "vmap of what uses it": lambda p: F.vmap(lambda row: row @ p)(torch.ones(2, 8)),
    "vmap without batching it": lambda p: F.vmap(lambda w, row: row @ w, in_dims=(None, 0))(p, torch.ones(2, 8)),
    "grad of what uses it": lambda p: F.grad(lambda x: (x * p).sum())(torch.ones(8, 8)),
    "jvp": lambda p: F.jvp(lambda w: w * w, (p,), (torch.ones(8, 8),)),
    "jvp of what uses it": lambda p: F.jvp(lambda x: x * p, (torch.ones(8, 8),), (torch.ones(8, 8),)),
    "jacfwd": lambda p: F.jacfwd(lambda w: w.sum())(p),
    "hessian": lambda p: F.hessian(lambda w: (w * w).sum())(p),
    "functional_call": lambda p: F.functional_call(torch.nn.Linear(8, 8, bias=False), {"weight": p}, (torch.ones(2, 8),)),
}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses_outside_of_calls_are_refused(use, is_trained):
    with fake_gpu.shared():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model[1].requires_grad_(is_trained)
        model, optimizer = wrap(model, "memory", units={"one": ["0"], "other": ["1"]}, device_facts=fake_gpu.FACTS, **GPU)
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


class TakesAWay(torch.nn.Module):
    """A model with a frozen parameter, which it uses in the given way, or not at all. When it does, the module before has its room."""

    way = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.scales = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x):
        x = self.first(x)
        return self.last(x if self.way is None else self.way(self.scales, x))


def at(address):
    return torch.frombuffer((ctypes.c_float * 64).from_address(address), dtype=torch.float32).view(8, 8)


WAYS = {
    "vmap": lambda p, x: x @ F.vmap(lambda row: row * 2)(p),
    "vmap of what uses it": lambda p, x: F.vmap(lambda row: row @ p)(x),
    "jvp of what uses it": lambda p, x: F.jvp(lambda y: y @ p, (x,), (x,))[0],
    "functional_call": lambda p, x: F.functional_call(torch.nn.Linear(8, 8, bias=False), {"weight": p}, (x,)),
    "an address": lambda p, x: x @ at(p.data_ptr()),
    "a storage": lambda p, x: x @ at(p.untyped_storage().data_ptr()),
    "another class": lambda p, x: x @ p.as_subclass(torch.Tensor),
    "DLPack's method": lambda p, x: x @ torch.from_dlpack(p.__dlpack__()),
}


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_uses_in_calls_find_values(way, before):
    """before: how many calls of the kind go another way before."""
    plain, x = TakesAWay(), torch.randn(2, 8)
    plain.way = way
    with fake_gpu.shared():
        model = TakesAWay()
        model, _ = wrap(model, "memory", units=units_of_modules(model), held_units=1, device_facts=fake_gpu.FACTS, **GPU)
        with torch.no_grad():
            for _ in range(before):
                model(x)
            model.way = way
            for _ in range(2):
                assert torch.equal(model(x), plain(x))
        sluice.torch.close(model)
        gc.collect()


class UsesAnAddressInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scales):
        ctx.scales = scales
        return x @ scales

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ at(ctx.scales.data_ptr()).T, None


def test_uses_in_backward_passes_find_values():
    plain, x = TakesAWay(), torch.randn(2, 8)
    plain.way = lambda p, x: UsesAnAddressInBackward.apply(x, p)
    plain(x).sum().backward()
    with fake_gpu.shared():
        model = TakesAWay()
        model, _ = wrap(model, "memory", units=units_of_modules(model), held_units=1, device_facts=fake_gpu.FACTS, **GPU)
        model.way = plain.way
        model(x).sum().backward()
        assert torch.equal(model.first.weight.grad + 0, plain.first.weight.grad)
        sluice.torch.close(model)
        gc.collect()


def test_vmap_over_more_units_than_may_be_held_is_refused():
    with fake_gpu.shared():
        model = TakesAWay()
        model, _ = wrap(model, "memory", units=units_of_modules(model), held_units=1, device_facts=fake_gpu.FACTS, **GPU)
        model.way = lambda p, x: x + F.vmap(lambda a, b: a * b)(p, model.last.weight).sum()
        with torch.no_grad(), pytest.raises(sluice.StateError, match=r"torch.func.vmap\(\) needs parameters of more units at once.*held_units"):
            model(torch.randn(2, 8))
        sluice.torch.close(model)
        gc.collect()


@torch.jit.script
def doubled(x):
    return x * 2


UNSEEN = {
    "grad": lambda p: F.grad(lambda w: (w * w).sum())(p),
    "vjp": lambda p: F.vjp(lambda w: w * 2, p)[0],
    "functionalize": lambda p: F.functionalize(lambda w: w * 2)(p),
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
    "a tensor's constructor": torch.tensor,
    "set_": lambda p: torch.empty(0).set_(p),
    "TorchScript": doubled,
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("use", UNSEEN.values(), ids=UNSEEN)
def test_what_does_not_ask_pytorch_finds_nan(use):
    with fake_gpu.shared():
        model, _ = wrap(torch.nn.Linear(8, 8), "device", device_facts=fake_gpu.FACTS, **GPU)
        with torch.no_grad():
            model(torch.randn(2, 8))
            found = use(model.weight)
        assert found.isnan().all()
        del found
        sluice.torch.close(model, values=False)
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


def test_what_asks_for_nodes_of_the_graph_works_anywhere():
    with fake_gpu.shared():
        model, optimizer = wrap(torch.nn.Linear(8, 4), "memory", **GPU)
        loss = model(torch.ones(2, 8)).sum()
        edge = torch.autograd.graph.get_gradient_edge(model.bias)
        assert torch.equal(torch.autograd.grad(loss, [edge], retain_graph=True)[0], torch.full((4,), 2.0))
        came = []
        hook = torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda gradients: came.append(len(gradients)))
        loss.backward()
        hook.remove()
        assert came == [2]
        with pytest.raises(sluice.StateError, match="'weight' is used by"):
            model.weight.view_as(model.weight)
        sluice.torch.close(model)
        del optimizer, loss, edge
        gc.collect()
