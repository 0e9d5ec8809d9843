"""The small models of tests over several ranks."""

import torch
import transformers
from support.user_models import small_llama, small_mixtral
from support.wrapped_models import small_gpt2
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
        self.begin, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, expert):
        return self.last(self.experts[expert](self.begin(x)).tanh())


def wide():
    """A model of which many units are too large for memory that small ones share, so that stage 3 partitions them."""
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=5, n_head=4, n_embd=256, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip


def reentrant():
    """A model whose blocks run a backward pass of their own within the backward pass of the whole."""
    model = small_gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model.train()


MODELS = {
    "gpt2": small_gpt2, "wide": wide, "reentrant": reentrant, "llama": small_llama, "mixtral": small_mixtral, "normed": Normed,
    "experts": Experts,
}  # fmt: skip
