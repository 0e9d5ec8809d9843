"""What PyTorch answers of tensors on a GPU otherwise than of those of the CPU, which stands in for one here."""

import gc

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of, trained
from support.wrapped_models import same, wrap

import sluice
import sluice.torch


@pytest.fixture
def wrapped():
    """A model on the GPU, and its optimizer."""
    with fake_gpu.shared():
        made = list(wrap(Layers(), "memory", **GPU))
        yield made
        sluice.torch.close(made[0], values=False)
        made.clear()
        gc.collect()


@pytest.mark.parametrize("moved", [
    lambda m: m.to("cuda"), lambda m: m.to("cuda:0"), lambda m: m.to(torch.device("cuda")), lambda m: m.cuda(), lambda m: m.cuda(0),
    lambda m: m.to(device=torch.device("cuda", 0), dtype=torch.float32, non_blocking=True), lambda m: m.share_memory(),
    lambda m: m.blocks[0].to("cuda") and m,
])  # fmt: skip
def test_a_model_is_moved_to_where_it_is(wrapped, moved):
    """All tensors on a GPU are shared for PyTorch, and "cuda" is a name for the GPU in use."""
    model = wrapped[0]
    with fake_gpu.answers_of_cuda():
        assert moved(model) is model
    with torch.no_grad():
        loss_of(model, 0)


@pytest.mark.parametrize("moved", [lambda m: m.to("cuda:1"), lambda m: m.cuda(1), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_it_is_moved_nowhere_else(wrapped, moved):
    with fake_gpu.answers_of_cuda(), pytest.raises(sluice.StateError, match=r"is to be moved to .*Move it before sluice.torch.wrap"):
        moved(wrapped[0])


def test_shared_memory_of_the_cpu_is_refused():
    model, _ = sluice.torch.wrap(Layers(), sluice.AdamW(), memory="4GiB", reserve="64MiB")
    with pytest.raises(sluice.StateError, match="memory that processes share"):
        model.share_memory()
    sluice.torch.close(model)


@pytest.mark.parametrize("place", ["device", "memory"])
def test_it_trains_to_the_same_bits(place):
    """Clipping takes other functions on a GPU, which ask for all norms at once."""
    expected = trained(Layers, loss_of, "memory", clip=0.05)
    with fake_gpu.shared():
        with fake_gpu.answers_of_cuda():
            found = trained(Layers, loss_of, place, GPU, clip=0.05)
        assert same(found, expected)
        gc.collect()


def test_an_estimate_leaves_the_random_numbers_of_the_gpu_as_they_are(monkeypatch):
    states = {"cuda:3": torch.tensor([7])}

    class Seeds(torch.nn.Linear):
        def forward(self, x):
            states["cuda:3"] = torch.tensor([8])
            return super().forward(x)

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state}))
    found = sluice.torch.estimate(Seeds(64, 64), torch.ones(512, 64), False, torch.device("cuda", 3))
    assert found.peak >= 512 * 64 * 4 and states["cuda:3"].item() == 7
