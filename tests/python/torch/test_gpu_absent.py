"""Parameters whose unit is not on the GPU: an operation on one is an error. The GPU is the fake one of the tests."""

import copy
import io
import pickle

import numpy
import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU
from support.wrapped_models import wrap

import sluice
import sluice.torch

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
}


@pytest.mark.parametrize("is_trained", [True, False])
def test_uses_outside_of_calls_are_refused(is_trained):
    with fake_gpu.shared():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model[1].requires_grad_(is_trained)
        model, optimizer = wrap(model, "memory", units={"one": ["0"], "other": ["1"]}, device_facts=fake_gpu.FACTS, **GPU)
        x = torch.randn(2, 8)

        def all_are_refused():
            for name, use in USES.items():
                with torch.no_grad(), pytest.raises(sluice.StateError, match="'1.weight' is used by .*its unit 'other'.*full_parameters"):
                    use(model[1].weight)
                    raise AssertionError(name)

        for _ in range(2):
            all_are_refused()
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad(), sluice.torch.full_parameters(model):
            assert model[0].weight.isfinite().all()
        all_are_refused()
        sluice.torch.close(model)
        assert type(model[1].weight) is torch.nn.Parameter
        del optimizer, all_are_refused


def test_what_asks_for_no_values_works_anywhere():
    with fake_gpu.shared():
        model, optimizer = wrap(torch.nn.Linear(8, 4), "memory", **GPU)
        p = model.weight
        assert (p.shape, p.dtype, p.numel(), p.device.type) == ((4, 8), torch.float32, 32, "cpu")
        assert isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad and not p.is_meta and p.grad is None
        assert [torch.zeros_like(p).shape, p.new_ones(3).tolist(), "(4, 8)" in repr(p)] == [(4, 8), [1, 1, 1], True]
        assert all(p is own for p, own in zip(model.parameters(), [model.weight, model.bias], strict=True))
        assert torch.nn.utils.parameters_to_vector([torch.zeros(2)]).shape == (2,)
        optimizer.zero_grad()
        model.requires_grad_(False).requires_grad_(True)
        sluice.torch.close(model)
        del optimizer
