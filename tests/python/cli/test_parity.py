"""Loss, every parameter's gradient and logits against transformers, on the same weights and tokens: in f32, and in f16
against f32 on the values that f16 holds."""

import json
import subprocess

import numpy as np
import pytest
import torch
from support import rounding
from support.perturbed import LINEAR, LLAMA3, gpt2, llama, make_model, mistral, qwen2
from support.sluice_process import BUILD

PARITY_DUMP = BUILD / "bin" / "parity_dump"
BATCH, LENGTH, MICRO_BATCHES = 2, 24, 3
IGNORED = -1
CASES = {
    "gpt2-tied": gpt2(vocab_size=97, n_embd=64),
    "gpt2-untied": gpt2(vocab_size=257, n_positions=24, n_layer=3, n_head=3, n_inner=80, tie_word_embeddings=False),
    "llama-untied": llama(num_key_value_heads=4),
    "llama-grouped-tied-llama3": llama(vocab_size=128, head_dim=24, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": mistral(head_dim=16, rope_parameters=LINEAR),
    "qwen2-bias": qwen2(),
}


def write_inputs(folder, model, tokens, targets, **settings):
    model.config.to_json_file(str(folder / "config.json"), use_diff=False)
    settings |= dict(batch=BATCH, length=LENGTH, micro_batches=MICRO_BATCHES)
    (folder / "run.json").write_text(json.dumps(settings))
    tokens.numpy().astype("<i4").tofile(folder / "tokens.bin")
    targets.numpy().astype("<i4").tofile(folder / "targets.bin")
    for name, parameter in model.named_parameters():
        parameter.detach().numpy().astype("<f4").tofile(folder / f"{name}.bin")


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.skipif(not PARITY_DUMP.exists(), reason=f"{PARITY_DUMP} is not built")
@pytest.mark.parametrize("settings", [
    dict(dtype="f32", loss_scale=1.0, recompute="full", group=2),
    dict(dtype="f16", loss_scale=8192.0, recompute="none", group=MICRO_BATCHES),
], ids=lambda settings: settings["dtype"])  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(case, settings, tmp_path):
    is_half = settings["dtype"] == "f16"
    model = make_model(CASES, case)
    if is_half:  # in f16 they are as near as f16 is
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
    shape = (MICRO_BATCHES * BATCH, LENGTH)
    tokens, targets = (torch.randint(0, model.config.vocab_size, shape) for _ in range(2))
    targets[0, :5] = targets[3, -1] = IGNORED
    rows = targets.numel()
    of_gradients = rounding.of_model(model, rows, torch.float16 if is_half else None)
    of_loss = rounding.of_mean(of_gradients, rows) if is_half else of_gradients
    write_inputs(tmp_path, model, tokens, targets, **settings)
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
