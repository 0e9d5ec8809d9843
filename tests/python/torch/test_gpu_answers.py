"""PyTorch answers some questions about tensors on a GPU otherwise than about those of the CPU, which stands in for one here."""

import pytest
import torch
import torch.utils.checkpoint
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of, trained
from support.wrapped_models import same, wrap

import sluice
import sluice.torch


STAYS = [
    lambda m: m.to("cuda"), lambda m: m.to("cuda:0"), lambda m: m.to(torch.device("cuda")), lambda m: m.cuda(), lambda m: m.cuda(0),
    lambda m: m.to(device=torch.device("cuda", 0), dtype=torch.float32, non_blocking=True), lambda m: m.share_memory(),
    lambda m: m.blocks[0].to("cuda") and m,
]  # fmt: skip
MOVES = [lambda m: m.to("cuda:1"), lambda m: m.cuda(1), lambda m: m.half(), lambda m: m.to(torch.bfloat16)]


def test_a_model_is_moved_to_where_it_is_and_nowhere_else():
    """All tensors on a GPU are shared for PyTorch, and "cuda" is a name for the GPU in use."""
    with fake_gpu.shared():
        model, _ = wrap(Layers(), "memory", **GPU)
        with fake_gpu.answers_of_cuda():
            for move in STAYS:
                assert move(model) is model
            for move in MOVES:
                with pytest.raises(sluice.StateError, match=r"is to be moved to .*Move it before sluice.torch.wrap"):
                    move(model)
        with torch.no_grad():
            loss_of(model, 0)
        sluice.torch.close(model, values=False)
        del model, _


@pytest.mark.parametrize("place", ["device", "memory"])
def test_it_trains_to_the_same_bits(place):
    """Clipping takes other functions on a GPU, which ask for all norms at once."""
    expected = trained(Layers, loss_of, "memory", clip=0.05)
    with fake_gpu.shared():
        with fake_gpu.answers_of_cuda():
            found = trained(Layers, loss_of, place, GPU, clip=0.05)
        assert same(found, expected)


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


class Twice(torch.nn.Module):
    """Uses its weight twice: in autocast's own cache both gradients would be added up in bf16."""

    def __init__(self, caches):
        super().__init__()
        self.weight, self.caches = torch.nn.Parameter(torch.empty(96, 96).normal_(std=0.1)), caches

    def forward(self, x):
        self.caches.append(torch.is_autocast_cache_enabled())
        x = torch.nn.functional.dropout(torch.nn.functional.linear(x, self.weight).tanh(), 0.1)
        return torch.nn.functional.linear(x, self.weight)


def autocast_loss(kind):
    def loss(model, step):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert torch.is_autocast_enabled(kind) and not torch.is_autocast_enabled("cuda" if kind == "cpu" else "cpu")
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        assert y.dtype == torch.bfloat16 and torch.is_autocast_cache_enabled() and not torch.is_autocast_enabled(kind)
        return y.float().square().mean()

    return loss


@pytest.mark.parametrize("place, gpu", [("device", GPU), ("memory", {"device_memory": "1GiB"})], ids=["stated", "estimated"])
def test_autocast_of_a_gpu_is_asked_for_by_its_name(place, gpu):
    """Autocast on the CPU is not on there. Its cache is off within the model's calls, also where backward computes again."""

    caches = []

    def made():
        return torch.nn.Sequential(Twice(caches), Twice(caches))

    expected = trained(made, autocast_loss("cpu"), "memory")
    with fake_gpu.shared():
        with fake_gpu.answers_of_cuda():
            found = trained(made, autocast_loss("cuda"), place, gpu)
        assert same(found, expected) and caches and not any(caches)
