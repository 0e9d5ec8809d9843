"""What PyTorch may take of a GPU's memory."""

import gc
import types

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of
from support.wrapped_models import wrap

import sluice
import sluice.torch
from sluice.torch import _gpu
from sluice.torch._gpu import BESIDE, Gpu
from sluice.torch._gpu_step import Account, FirstStepOnGpu

MIB = 1 << 20


def test_where_nothing_is_stated_pytorch_gets_a_large_part_and_what_is_left():
    with fake_gpu.shared():
        model, _ = wrap(Layers(), None, **GPU | {"reserve": None})
        plan = sluice.torch.engine_of(model).plan()
        assert plan["pytorch"]["reserve"] == 512 * MIB + plan["budget"]["device"] - plan["device"] > 900 * MIB
        loss_of(model, 0).backward()
        sluice.torch.close(model)
        del model, _
        gc.collect()


def test_where_half_is_too_much_it_gets_less():
    with fake_gpu.shared():
        given = {"reserve": None, "device_memory": "400MiB", "device_facts": fake_gpu.FACTS, "optimizer": sluice.SGD(lr=0.1)}
        model, _ = wrap(torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]), "device", **given)
        plan = sluice.torch.engine_of(model).plan()
        assert plan["pytorch"]["reserve"] == 400 * MIB // 4 + plan["budget"]["device"] - plan["device"]
        sluice.torch.close(model, values=False)
        del model, _
        gc.collect()


def test_room_is_left_for_cudas_libraries(monkeypatch):
    gpu = Gpu(0, torch.device("cuda", 0))
    assert gpu.beside == BESIDE == 160 * MIB and Gpu(0, torch.device("cpu")).beside == 0
    monkeypatch.setattr(_gpu, "_bounds", {})
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    gpu.check_room(torch.nn.Linear(1, 1), 12 * MIB, Account(172 * MIB, 0))
    with pytest.raises(sluice.BudgetError, match="have 12 MiB of the memory of GPU 0 .reserve., CUDA's libraries 160 MiB, and 171 MiB are free"):
        gpu.check_room(torch.nn.Linear(1, 1), 12 * MIB, Account(171 * MIB, 0))
    plan = {"predicted_peak": 0, "budget": {"device": 1000 * MIB}, "device": 1000 * MIB, "bytes": {"device": {"base": 500 * MIB}}}
    card = types.SimpleNamespace(beside=160 * MIB, held=lambda: 0, begin_peak=lambda: None, peak=lambda: 0)
    free = [400 * MIB]
    made = FirstStepOnGpu(card, 1 << 40, 300 * MIB, None, lambda: Account(free[0], 0), 460 * MIB)
    made.planned(plan)
    free[0] -= 160 * MIB
    made.end()  # warns of nothing
    assert made.as_dict()["beside"] == 160 * MIB
