"""A model of three layers, and loops with it, plain or wrapped."""

import torch
from support.wrapped_models import update
from torch import nn

WIDTH = 24


def drawn(step, rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


class Chain(nn.Module):
    """Three layers, of which the tests make models."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def loss_of(model, step):
    return model(drawn(step)).square().mean()


def plain_loop(model, optimizer, note, steps=4, loss_of=loss_of):
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        note(loss)
        optimizer.step()
        optimizer.zero_grad()


def still_trains(model, optimizer):
    update(optimizer, loss_of(model, 0))
    return True


class Keeping(Chain):
    """A module that keeps things in its first forward: a table, a count, a list, a dict, and old weight_norm's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.calls, self.seen, self.by_kind = None, 0, [], {"last": (self.last.weight,)}
        nn.utils.weight_norm(self.middle)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(x.shape[-1]).float().cos()
        self.calls += 1
        self.seen.append(x.mean())
        self.by_kind["x"] = x
        return nn.functional.linear(super().forward(x) * self.table, self.by_kind["last"][0])
