"""Folders of transformers: the model that is read and saved is the same, and so is its greedy text; other folders are
refused before anything is written."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
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


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def changed(name, change):
    def damage(path):
        tensors = load_file(path)
        save_file(tensors | {name: change(tensors[name])}, path, {"format": "pt"})

    return damage


def replace_by_pickle(path):
    torch.save({"a": torch.zeros(3)}, path)


# tests/engine/checkpoint and tests/models/families have each way in which a file may be damaged.
DAMAGES = {
    "cut": (truncate, ["cut short", "'transformer."]),
    "reshaped": (changed("transformer.h.1.mlp.c_fc.weight", lambda t: t.t().contiguous()), ["'transformer.h.1.mlp.c_fc.weight'", "[192, 48]"]),
    "retyped": (changed("transformer.ln_f.bias", lambda t: t.int()), ["'transformer.ln_f.bias'", "I32"]),
    "another format": (replace_by_pickle, ["no safetensors file"]),
}


def contents(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def expect_refused(tmp_path, *parts):
    """train and generate refuse the folder; the metrics and --out, a folder with other files, stay as they are."""
    flags = flags_for(tmp_path, memory="512MiB", progress="none", metrics=tmp_path / "metrics.jsonl")
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    (out / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    trained = run_sluice("train", **flags)
    generated = run_sluice("generate", checkpoint=tmp_path / "model", prompt="a", tokens=1, threads=1)
    assert contents(tmp_path) == before
    for finished in (trained, generated):
        message = finished.stderr.decode()
        assert finished.returncode == 2, message
        for part in parts:
            assert part in message
    assert generated.stdout == b""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_model(CASES, "gpt2-tied").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("damage, parts", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(damage, parts, folder):
    path = folder / "model" / "model.safetensors"
    damage(path)
    expect_refused(folder, str(path), *parts)


def test_shards_that_are_missing_or_misplaced_are_named(tmp_path):
    make_model(CASES, "gpt2-tied").save_pretrained(tmp_path / "model", max_shard_size="40KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name = "transformer.h.1.ln_2.weight"
    shard = whole["weight_map"][name]
    other = next(file for file in whole["weight_map"].values() if file != shard)
    for place in (other, "../" + shard, "/" + shard, 7):
        index.write_text(json.dumps(whole | dict(weight_map=whole["weight_map"] | {name: place})))
        expect_refused(tmp_path, str(index), *([f"'{name}'"] if isinstance(place, str) else ["weight_map"]))
    index.write_text(json.dumps(whole)[:-10])
    expect_refused(tmp_path, str(index))
    index.write_text(json.dumps(whole))
    (tmp_path / "model" / shard).unlink()
    expect_refused(tmp_path, str(tmp_path / "model" / shard), "is missing", "'transformer.")


@pytest.mark.parametrize(
    "change, part",
    [
        (dict(n_layer=3), "'transformer.h.2.ln_1.weight' is missing"),
        (dict(n_embd=96), "has the shape"),
        (dict(n_head=5), "'n_head'"),
        (dict(activation_function="relu"), "'activation_function'"),
        (dict(tie_word_embeddings=False), "'lm_head.weight' is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change, part, folder):
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    expect_refused(folder, str(folder / "model"), part)


def test_a_folder_of_something_else_is_refused(folder):
    path = folder / "model" / "config.json"
    for text in ("", "[]", '{"model_type": '):
        path.write_text(text)
        expect_refused(folder, str(path))
    path.unlink()
    expect_refused(folder, str(folder / "model"), "config.json")
