"""A folder with config.json alone trains from first values, also on bytes; one with weights that Sluice cannot read does not."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.perturbed import gpt2, llama, qwen2
from support.sluice_process import run_sluice, train
from transformers import AutoModelForCausalLM

CONFIGS = {
    "gpt2-bytes": gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)[1],
    "gpt2-more": gpt2(vocab_size=300)[1],
    "llama-tied": llama(vocab_size=320, tie_word_embeddings=True)[1],
    "llama-untied": llama(vocab_size=256, initializer_range=0.05)[1],
    "qwen2": qwen2(vocab_size=257, num_key_value_heads=2)[1],
}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text("Once upon a time there was a plan. " * 40)
    return tmp_path / "text"


def flags_for(tmp_path, **more):
    return dict(data=tmp_path / "text", out=tmp_path / "out", seq=16, batch=2, steps=2, threads=1) | more


def save(config, folder, **changes):
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return folder


@pytest.mark.parametrize("case", CONFIGS)
def test_what_comes_of_it_loads_in_transformers(case, text, tmp_path):
    shape = save(CONFIGS[case], tmp_path / "shape")
    flags = flags_for(tmp_path, model=shape, tokens="bytes")
    planned = run_sluice("plan", memory="512MiB", **flags)
    assert planned.returncode == 0, planned.stderr
    assert f"first values, seed 1; no weights in '{shape}'" in planned.stdout.decode()
    lines, checkpoint = train(**flags)
    assert len(lines) == 2 and not [file for file in shape.iterdir() if file.name != "config.json"]

    loaded, notes = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
    assert not any(notes.values()), notes
    assert type(loaded) is type(AutoModelForCausalLM.from_config(CONFIGS[case]))
    stored = load_file(checkpoint / "model.safetensors")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.data, stored[name]), name
    generated = run_sluice("generate", checkpoint=checkpoint, prompt="Once", tokens=12, threads=1)
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith(b"Once") and len(generated.stdout) == 4 + 12 + 1 and not generated.stderr


def greedy(checkpoint, prompt, count, **flags):
    """The likeliest tokens after a prompt, and what was said."""
    done = run_sluice("generate", checkpoint=checkpoint, prompt_tokens=",".join(map(str, prompt)), tokens=count,
                      temperature=0, output="tokens", threads=1, **flags)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()], done.stderr.decode()


def test_text_beyond_what_was_learned_at_once_follows_from_its_end(text, tmp_path):
    _, checkpoint = train(**flags_for(tmp_path, model="tiny", tokens="bytes", seq=16, steps=200, lr=3e-3))
    prompt = list(b"Once upon")
    tokens, told = greedy(checkpoint, prompt, 40)
    assert "last 16, as many as the model has learned from" in told and "--window" in told
    whole = prompt + tokens
    for end in range(len(prompt), len(whole), 5):
        assert greedy(checkpoint, whole[max(0, end - 16) : end], 1) == ([whole[end]], "")
    longer, told = greedy(checkpoint, prompt, 40, window=64)
    assert longer[: 16 - len(prompt) + 1] == tokens[: 16 - len(prompt) + 1] and longer != tokens
    assert "has learned from 16 tokens at once" in told
    shorter, told = greedy(checkpoint, prompt, 40, window=4)
    assert greedy(checkpoint, (prompt + shorter)[20:24], 1)[0] == [shorter[24 - len(prompt)]] and not told
    expect_refused("generate", "--window is 0", "1 to", checkpoint=checkpoint, prompt="a", tokens=1, window=0)
    expect_refused("generate", "--window is 100000", "context", checkpoint=checkpoint, prompt="a", tokens=1, window=100000)


@pytest.mark.parametrize("case", ["gpt2-more", "llama-untied"])
def test_the_values_are_those_that_transformers_begins_with(case, text, tmp_path):
    """The deviation of each tensor is within five standard errors of the configuration's."""
    config = CONFIGS[case]
    _, checkpoint = train(**flags_for(tmp_path, model=save(config, tmp_path / "shape"), tokens="bytes", lr=0))
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.full_like(tensor, 0.0 if name.endswith("bias") else 1.0)), name
            continue
        expected = config.initializer_range / ((2 * config.n_layer) ** 0.5 if "c_proj" in name else 1)
        error = expected / (2 * tensor.numel()) ** 0.5
        assert abs(tensor.std().item() - expected) < 5 * error, name
        assert abs(tensor.mean().item()) < 5 * expected / tensor.numel() ** 0.5, name


def test_the_shape_of_a_preset_has_its_bits(text, tmp_path):
    _, preset = train(**flags_for(tmp_path, model="tiny", out=tmp_path / "preset"))
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_bytes((preset / "config.json").read_bytes())
    _, own = train(**flags_for(tmp_path, model=shape))
    for name in ("model.safetensors", "optimizer.exp_avg.safetensors"):
        assert (own / name).read_bytes() == (preset / name).read_bytes()


def test_what_was_trained_on_bytes_goes_on_with_bytes(text, tmp_path):
    _, checkpoint = train(**flags_for(tmp_path, model=save(CONFIGS["gpt2-more"], tmp_path / "shape"), tokens="bytes"))
    again = flags_for(tmp_path, model=checkpoint, tokens="bytes", out=tmp_path / "again", lr=0)
    _, same = train(**again)
    assert (same / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "manifest.json").unlink()  # which makes it a folder of weights of unknown origin
    refused = run_sluice("train", memory="512MiB", progress="none", **again | dict(out=tmp_path / "third"))
    assert refused.returncode == 2 and b"weights of other tokens" in refused.stderr


def expect_refused(command, *parts, **flags):
    finished = run_sluice(command, **flags)
    message = finished.stderr.decode()
    assert finished.returncode == 2 and not finished.stdout, message
    for part in parts:
        assert part in message, message


def test_text_needs_a_vocabulary_of_all_bytes(text, tmp_path):
    small = save(gpt2(vocab_size=255)[1], tmp_path / "small")
    for tokens, parts in (("bytes", ["at least 256", "255"]), ("auto", ["--tokens bytes", "255"])):
        expect_refused("train", str(small), *parts, **flags_for(tmp_path, model=small, tokens=tokens))
    more = save(CONFIGS["gpt2-more"], tmp_path / "more")
    expect_refused("train", str(more), "--tokens bytes", "300", **flags_for(tmp_path, model=more))
    assert not (tmp_path / "out").exists()


def test_there_is_nothing_to_sample_from(tmp_path):
    shape = save(CONFIGS["gpt2-bytes"], tmp_path / "shape")
    expect_refused("generate", str(shape), "no weights", "sluice train", checkpoint=shape, prompt="a", tokens=1)


UNREAD = [
    "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack",
    "consolidated.00.pth", "model-q4.gguf", "model-00001-of-00002.safetensors", "model.safetensors.incomplete", "optimizer.pt",
]  # fmt: skip


def test_weights_that_are_not_read_are_never_taken_for_none(text, tmp_path):
    shape = save(CONFIGS["gpt2-bytes"], tmp_path / "shape")
    for number, name in enumerate(UNREAD):
        (shape / name).write_bytes(b"weights")
        expect_refused(("train", "plan")[number % 2], str(shape), name, "save_pretrained", **flags_for(tmp_path, model=shape))
        if number == 0:
            expect_refused("generate", str(shape), name, checkpoint=shape, prompt="a", tokens=1)
        (shape / name).unlink()
    assert not (tmp_path / "out").exists()
