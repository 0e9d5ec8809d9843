"""Folders of transformers: the model that is read and saved is the same, and so is its greedy text; one that cannot be read is refused
before anything is written."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.perturbed import LLAMA3, gpt2, llama, make_model, mistral, qwen2
from support.sluice_process import run_sluice, train
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

WIDE = dict(initializer_range=0.2)
CASES = {
    "gpt2-tied": gpt2(**WIDE),
    "llama-tied": llama(vocab_size=256, head_dim=8, tie_word_embeddings=True, rope_parameters=LLAMA3, **WIDE),
    "llama-untied": llama(num_key_value_heads=4, **WIDE),
    "mistral": mistral(**WIDE),
    "qwen2": qwen2(**WIDE),
}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def write_data(folder):
    """Writes tokens that all vocabularies here have."""
    (folder / "data.bin").write_bytes(np.arange(400, dtype="<u2").__mod__(97).tobytes())
    return folder / "data.bin"


def flags_for(folder, **more):
    settings = dict(model=folder / "model", data=write_data(folder), out=folder / "out", seq=16, batch=1, steps=1)
    return settings | dict(warmup=0, held_out=0, schedule="constant", threads=1) | more


def meaning(folder):
    config = AutoConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in config.items() if key not in {"dtype", "_name_or_path"}}


def load_with_transformers(folder, dtype):
    model, notes = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(notes.values()), notes
    assert model.dtype == dtype
    return model.eval()


def same_bits(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def folders():
    """Every kind of folder with every pair of types; by default each kind with one, and each pair at least once."""
    stored_and_trained = [("f32", "f32"), ("bf16", "f32"), ("f16", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("f32", "bf16"), ("f32", "f16")]
    for number, kind in enumerate(itertools.product(CASES, ["5GB", "40KB"])):
        for other, types in enumerate(stored_and_trained):
            yield pytest.param(*kind, *types, marks=() if number % len(stored_and_trained) == other else pytest.mark.long)


@pytest.mark.parametrize("case, shards, stored, trained", list(folders()))
def test_a_step_of_no_length_gives_the_folder_back(case, shards, stored, trained, tmp_path):
    """A narrower type rounds to the nearest, and has f32 masters."""
    model = make_model(CASES, case, TYPES[stored])
    model.save_pretrained(tmp_path / "model", max_shard_size=shards)
    assert (tmp_path / "model" / "model.safetensors").exists() == (shards == "5GB")
    given = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        given |= load_file(file)
    _, checkpoint = train(**flags_for(tmp_path, lr=0, dtype=trained))

    same_bits(load_file(checkpoint / "model.safetensors"), {n: t.to(TYPES[trained]) for n, t in given.items()})
    assert (checkpoint / "optimizer.master.safetensors").exists() == (trained != "f32")
    if trained != "f32":
        masters = load_file(checkpoint / "optimizer.master.safetensors")
        same_bits(masters, {n: t.float() for n, t in given.items()})
    if shards == "5GB":
        loaded = load_with_transformers(checkpoint, TYPES[trained])
        same_bits(loaded.state_dict(), model.to(TYPES[trained]).state_dict())
        assert meaning(checkpoint) == meaning(tmp_path / "model")


def test_checkpoints_have_the_folders_tokenizer_and_settings_of_generation(tmp_path):
    """Also those of a resumed run, which goes on whatever its user does with the copies. What is no regular file is left out, and a link is
    followed, as in the cache of a hub."""
    model, folder = make_model(CASES, "llama-tied"), tmp_path / "model"
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(folder)
    byte_tokens = Tokenizer(models.BPE({chr(i + 32): i for i in range(97)}, []))
    PreTrainedTokenizerFast(tokenizer_object=byte_tokens, eos_token="a", chat_template="{{ messages }}").save_pretrained(folder)
    (folder / "tokenizer.json").rename(tmp_path / "blob")
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    (folder / "merges.txt").mkdir()
    (folder / "notes.txt").write_text("of the folder alone")
    copied = {file.name for file in folder.iterdir()} - {"config.json", "model.safetensors", "merges.txt", "notes.txt"}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= copied
    for steps, words in ((1, []), (2, ["--resume"])):
        finished = run_sluice("train", *words, memory="512MiB", **flags_for(tmp_path, steps=steps))
        assert finished.returncode == 0, finished.stderr.decode()
        checkpoint = tmp_path / "out" / f"step-{steps:08}"
        assert all((checkpoint / name).read_bytes() == (folder / name).read_bytes() for name in copied)
        assert not (checkpoint / "tokenizer.json").is_symlink() and not (checkpoint / "notes.txt").exists()
        if steps == 1:
            (checkpoint / "chat_template.jinja").write_text("{{ other }}")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.encode("abc") == AutoTokenizer.from_pretrained(folder).encode("abc") != [] and tokenizer.eos_token == "a"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).generation_config.top_k == 7


def greedy(model, prompt, count):
    """The likeliest tokens by transformers' own generation, and the least lead of one over the next likely."""
    made = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=count,
        pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(made.scores).topk(2).values
    return made.sequences[0, len(prompt) :].tolist(), (best[..., 0] - best[..., 1]).min().item()


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case, tmp_path):
    model = make_model(CASES, case)
    model.save_pretrained(tmp_path)
    prompt = [84, 72, 69, 32]
    expected, lead = greedy(model, prompt, 40)
    assert len(expected) == 40 and len(set(expected)) > 4 and lead > 1e-3, "the reference would tell nothing"
    bytes_are_tokens = model.config.vocab_size == 256
    words = bytes(prompt) if bytes_are_tokens else " ".join(map(str, prompt)).encode()
    finished = run_sluice("generate", checkpoint=tmp_path, prompt=words.decode(), tokens=40, temperature=0, threads=1)
    assert finished.returncode == 0, finished.stderr
    if bytes_are_tokens:
        assert finished.stdout == bytes(prompt + expected) + b"\n"
    else:
        assert [int(word) for word in finished.stdout.split()] == expected


def contents(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_a_folder_that_cannot_be_read_is_refused_before_anything_is_written(tmp_path):
    """Metrics and --out, a folder with other files, stay as they are. tests/engine/checkpoint and tests/models/families have each way in
    which files, shards, their index and a configuration may be wrong, and what is said."""
    model, out = tmp_path / "model", tmp_path / "out"
    make_model(CASES, "gpt2-tied").save_pretrained(model)
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    flags = flags_for(tmp_path, memory="512MiB", progress="none", metrics=tmp_path / "metrics.jsonl")
    for file, parts in (("model.safetensors", ["cut short", "'transformer."]), ("config.json", ["config.json"])):
        whole = (model / file).read_bytes()
        (model / file).write_bytes(whole[:-100])
        before = contents(tmp_path)
        trained = run_sluice("train", **flags)
        generated = run_sluice("generate", checkpoint=model, prompt="a", tokens=1, threads=1)
        assert contents(tmp_path) == before and generated.stdout == b""
        for finished in (trained, generated):
            assert finished.returncode == 2 and all(part in finished.stderr.decode() for part in [str(model / file), *parts])
        (model / file).write_bytes(whole)
