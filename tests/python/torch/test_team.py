"""The engine of a wrapped model computes on PyTorch's threads."""

import ctypes

import pytest
import torch
from support import fake_gpu
from support.wrapped_models import wrap

import sluice.torch
from sluice.torch import _prepare

Parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@fake_gpu.cpu_alone("it counts loops of the CPU's updates, and a GPU updates this model itself")
def test_a_wrapped_models_loops_run_on_pytorchs_team(monkeypatch):
    """Every loop of the update goes through PyTorch's GOMP_parallel. That no second OpenMP is loaded is in test_wheel.py."""
    address = sluice.torch.team()
    if address is None:
        pytest.skip("this PyTorch has no OpenMP with GOMP_parallel")
    pytorchs, asked = Parallel(address), []

    def counted(function, data, threads, flags):
        asked.append(threads)
        pytorchs(function, data, threads, flags)

    given = Parallel(counted)
    monkeypatch.setattr(_prepare, "team", lambda: ctypes.cast(given, ctypes.c_void_p).value)

    def values():
        torch.manual_seed(0)
        model = torch.nn.Linear(1024, 1024)
        model, optimizer = wrap(model, "memory")
        model(torch.ones(2, 1024)).square().mean().backward()
        begun = len(asked)
        optimizer.step()
        sluice.torch.engine_of(model).settle()
        used = asked[begun:]
        weight = model.weight.detach().clone()
        sluice.torch.close(model)
        return weight, used

    counted_weight, used = values()
    assert used and set(used) == {torch.get_num_threads()}
    monkeypatch.undo()
    weight, used = values()
    assert not used and torch.equal(weight, counted_weight)
