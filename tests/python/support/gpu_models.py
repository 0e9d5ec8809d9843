"""Models that tests wrap on a GPU, the arguments with which they do, and the run that compares it with the CPU."""

import torch
import torch.utils.checkpoint
from support import fake_gpu
from support.wrapped_models import same, units_of_modules, wrap

import sluice
import sluice.torch

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
