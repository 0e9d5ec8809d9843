"""Loss, every parameter's gradient and logits against transformers, on the same weights and tokens: in f32, and in f16
against f32 on the values that f16 holds."""

import json
import subprocess

import numpy as np
import pytest
import torch
from support import rounding
from support.sluice_process import BUILD
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

PARITY_DUMP = BUILD / "bin" / "parity_dump"
BATCH, LENGTH, MICRO_BATCHES = 2, 24, 3
IGNORED = -1

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
LLAMA = dict(
    hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

CASES = {
    "gpt2-tied": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=97, n_positions=32, n_embd=64, n_layer=2, n_head=4, **NO_DROPOUT),
    ),
    "gpt2-untied": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=257,
            n_positions=24,
            n_embd=48,
            n_layer=3,
            n_head=3,
            n_inner=80,
            tie_word_embeddings=False,
            **NO_DROPOUT,
        ),
    ),
    "llama-untied": (LlamaForCausalLM, LlamaConfig(vocab_size=101, num_key_value_heads=4, **LLAMA)),
    "llama-grouped-tied-llama3": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=128, num_key_value_heads=2, tie_word_embeddings=True, head_dim=24, rope_parameters=LLAMA3, **LLAMA
        ),
    ),
    "qwen2-bias": (Qwen2ForCausalLM, Qwen2Config(vocab_size=99, num_key_value_heads=1, **LLAMA)),
}


def reference(case):
    """The model with random weights (biases and norms too), tokens and targets, of which some do not count."""
    model_type, config = CASES[case]
    torch.manual_seed(list(CASES).index(case) + 1)
    model = model_type(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tokens = torch.randint(0, config.vocab_size, (MICRO_BATCHES * BATCH, LENGTH))
    targets = torch.randint(0, config.vocab_size, (MICRO_BATCHES * BATCH, LENGTH))
    targets[0, :5] = IGNORED
    targets[3, -1] = IGNORED
    return model, tokens, targets


def write_inputs(folder, model, tokens, targets, recompute, group, **more):
    model.config.to_json_file(str(folder / "config.json"), use_diff=False)
    settings = dict(batch=BATCH, length=LENGTH, micro_batches=MICRO_BATCHES, recompute=recompute, group=group, **more)
    (folder / "run.json").write_text(json.dumps(settings))
    tokens.numpy().astype("<i4").tofile(folder / "tokens.bin")
    targets.numpy().astype("<i4").tofile(folder / "targets.bin")
    for name, parameter in model.named_parameters():
        parameter.detach().numpy().astype("<f4").tofile(folder / f"{name}.bin")


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("recompute,group", [("none", MICRO_BATCHES), ("full", 2)])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(case, recompute, group, tmp_path):
    if not PARITY_DUMP.exists():
        pytest.skip(f"{PARITY_DUMP} is not built")
    model, tokens, targets = reference(case)
    check(tmp_path, model, tokens, targets, recompute, group, dict(dtype="f32", loss_scale=1.0))


@pytest.mark.parametrize("case", CASES)
def test_in_f16_as_near_as_f16_is(case, tmp_path):
    if not PARITY_DUMP.exists():
        pytest.skip(f"{PARITY_DUMP} is not built")
    model, tokens, targets = reference(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    check(tmp_path, model, tokens, targets, "none", MICRO_BATCHES, dict(dtype="f16", loss_scale=8192.0))


def check(tmp_path, model, tokens, targets, recompute, group, settings):
    rows = targets.numel()
    of_gradients = rounding.of_model(model, rows, torch.float16 if settings["dtype"] == "f16" else None)
    of_loss = of_gradients if settings["dtype"] == "f32" else rounding.of_mean(of_gradients, rows)
    write_inputs(tmp_path, model, tokens, targets, recompute, group, **settings)
    subprocess.run([PARITY_DUMP, tmp_path], check=True, timeout=120)

    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    found = float(np.fromfile(tmp_path / "loss.bin", "<f8")[0])
    assert abs(found - loss.item()) < of_loss * loss.item()
    errors = {}
    for name, parameter in model.named_parameters():
        gradient = np.fromfile(tmp_path / f"{name}.grad.bin", "<f4").reshape(parameter.shape)
        errors[name] = relative_error(gradient, parameter.grad.numpy())
    assert max(errors.values()) < of_gradients, errors
    last = np.fromfile(tmp_path / "logits.bin", "<f4")
    assert relative_error(last, logits[0, LENGTH - 2].detach().numpy()) < of_gradients
    written = {path.name.removesuffix(".grad.bin") for path in tmp_path.glob("*.grad.bin")}
    assert written == set(dict(model.named_parameters()))
