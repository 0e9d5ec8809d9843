"""Models that tests wrap on a GPU, and the arguments with which they do."""

import torch
import torch.utils.checkpoint

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
