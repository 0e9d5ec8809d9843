"""The small models of tests over several ranks."""

import re

import transformers
from support.user_models import small_llama, small_mixtral
from support.wrapped_models import small_gpt2, units_of_modules
from torch import nn


class Normed(nn.Module):
    """A network with batch norm, whose running statistics are buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class Experts(nn.Module):
    """A layer with experts of which each call uses the one that its input names."""

    def __init__(self):
        super().__init__()
        self.begin, self.last = nn.Linear(16, 384), nn.Linear(384, 1)
        self.experts = nn.ModuleList(nn.Linear(384, 384) for _ in range(4))

    def forward(self, x, expert):
        return self.last(self.experts[expert](self.begin(x)).tanh())


def wide(n_layer=3):
    """A model of many units that are partitioned."""
    return small_gpt2(n_layer=n_layer, n_embd=256)


def convolutional():
    """A network with batch norm and convolutions, of which the last ones are partitioned."""
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 128], depths=[1, 2], layer_type="basic", num_labels=10
        )
    )  # fmt: skip


def reentrant():
    """A model whose blocks run a backward pass of their own within the backward pass of the whole."""
    model = small_gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model.train()


MODELS = {
    "gpt2": small_gpt2, "wide": wide, "wide in half": lambda: wide(5), "reentrant": reentrant, "convolutional": convolutional,
    "normed": Normed, "experts": Experts,
    "llama": lambda: small_llama(192, 384, 2), "mixtral": lambda: small_mixtral(128, 192),
}  # fmt: skip
WHOLE = 512 << 10  # bytes up to which units share memory, so that no stage partitions them


def units_of(name, model):
    """Makes every block of a transformer a unit, and elsewhere, and in the wide ones, every module with parameters of its own."""
    units = {}
    for module, names in units_of_modules(model).items():
        block = None if name.startswith("wide") else re.match(r"(transformer\.h|model\.layers)\.\d+", module)
        units.setdefault(block[0] if block else module, []).extend(names)
    return units
