"""Small models of transformers with weights of their own. A case is a class and its configuration."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

NO_TOKENS = dict(bos_token_id=None, eos_token_id=None)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
GPT2 = dict(vocab_size=256, n_positions=64, n_embd=48, n_layer=2, n_head=4) | NO_DROPOUT | NO_TOKENS
SHAPE = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64) | NO_TOKENS
LINEAR = dict(rope_type="linear", factor=2.5, rope_theta=10000.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500.0)
LLAMA3 |= dict(original_max_position_embeddings=16)


def gpt2(**changes):
    return GPT2LMHeadModel, GPT2Config(**GPT2 | changes)


def llama(**changes):
    return LlamaForCausalLM, LlamaConfig(**SHAPE | dict(vocab_size=101, num_key_value_heads=2) | changes)


def mistral(**changes):
    return MistralForCausalLM, MistralConfig(**SHAPE | dict(vocab_size=103, num_key_value_heads=2, sliding_window=None) | changes)


def qwen2(**changes):
    return Qwen2ForCausalLM, Qwen2Config(**SHAPE | dict(vocab_size=99, num_key_value_heads=1) | changes)


def make_model(cases, case, dtype=torch.float32):
    """The model of cases[case], with the same weights in each call, none of which is zero or one."""
    model_type, config = cases[case]
    torch.manual_seed(list(cases).index(case) + 1)
    model = model_type(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype)
