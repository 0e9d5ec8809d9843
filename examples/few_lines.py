"""The small examples' data and model: a few lines of text, whose bytes are tokens, and a small model; nothing is downloaded."""

import torch
import transformers

TEXT = """A unit is a part of a model that is used together, such as a block.
While one unit computes, the next one comes from the disk.
What was used longest ago makes room, and its address stays the same.
A step ends when every gradient has been applied to its parameter.
"""


def pieces(length):
    """The text again and again, cut into 64 pieces of so many tokens."""
    ids = torch.tensor(list(TEXT.encode()))
    return ids.repeat(64 * length // len(ids) + 1)[: 64 * length].view(64, length)


def small_gpt2():
    """A GPT-2 of 0.8 million parameters, which has a token for each byte."""
    torch.manual_seed(0)
    no_tokens = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4, **no_tokens)
    )
