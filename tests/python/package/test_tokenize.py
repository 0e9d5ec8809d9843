"""Tokens of text: pieces have the tokens of the whole, and the file has those of transformers, and is whole or absent."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from support.perturbed import gpt2
from support.sluice_process import PACKAGE, run_sluice
from support.tokenizers_of_kinds import END, KINDS, lesson, make_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import sluice
from sluice import __main__, _pieces, _tokenizer

PIECE, MARGIN = 700, 128  # small ones, which make many cuts in short texts


def hard_texts():
    choose = random.Random(3)
    blanks, words = ["\n", "\n\n", " ", "   ", "\t", "\r\n"], ["a", "foo ", " bar", "'s", "123", "!", END]
    parts = [*blanks, *words, "é", "e\u0301", "日本語", "🙂"]
    yield "words", "\n\n".join(lesson())[:20000]
    yield "mixture", "".join(choose.choice(parts) for _ in range(4000))
    yield "blanks", " " * 3000 + "x" + "\n" * 3000 + "y"
    yield "one-letter", "a" * 5000 + "b" + "a" * 777
    yield "no-words", "".join(chr(choose.randrange(0x4E00, 0x9FFF)) for _ in range(3000))
    yield "few-letters", "".join(choose.choice("ab \n") for _ in range(5000))


def in_pieces(tokenizer, text, chunk=997):
    chunks = (text[at : at + chunk] for at in range(0, len(text), chunk))
    return list(_pieces.encode(tokenizer, chunks, PIECE, MARGIN))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole(kind):
    tokenizer = make_tokenizer(kind)
    for name, text in hard_texts():
        runs = in_pieces(tokenizer, text)
        assert sum(runs, []) == tokenizer.encode(text, add_special_tokens=False).ids, name
        assert name != "words" or len(runs) > 15, "it was hardly cut"


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "metaspace"])
def test_cuts_anywhere_would_change_tokens(kind):
    tokenizer, text = make_tokenizer(kind), dict(hard_texts())["mixture"]
    parts = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
    assert ids != tokenizer.encode(text, add_special_tokens=False).ids


def test_a_text_without_a_place_to_cut_is_refused(monkeypatch):
    monkeypatch.setattr(_pieces, "LONGEST", 4000)
    with pytest.raises(sluice.InvalidArgumentError, match="4000 characters of text cannot be cut"):
        in_pieces(make_tokenizer("wordpiece"), "a" * 20000)


# ---- the command ----


def sluice_module(*words, **more):
    command = [sys.executable, "-m", "sluice", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **more)


@pytest.fixture
def refused(monkeypatch, capsys):
    """Gives words to `python -m sluice` in this process. Returns what it says of the words, which it must refuse."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["sluice", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        told = capsys.readouterr()
        assert ended.value.code == 2 and told.err.startswith("sluice: error: ") and not told.out, told
        return told.err

    return run


def tokenize(*words):
    done = sluice_module("tokenize", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer, and one with files of text and others."""
    made = tmp_path_factory.mktemp("tokenize")
    make_tokenizer("gpt2").save(str(made / "tokenizer.json"))
    text = made / "text"
    (text / "b").mkdir(parents=True)
    (text / ".hidden").mkdir()
    (text / "b" / "2.txt").write_bytes("second\r\n\r\n  café 🙂".encode())
    (text / "a.txt").write_text("\n\n".join(lesson())[:30000])
    (text / ".hidden" / "x.txt").write_text("not seen")
    (text / "empty.txt").write_text("")
    (text / "binary").write_bytes(b"\0\1")
    return made


def tokens_of(path):
    raw = path.read_bytes()
    magic, version, count = np.frombuffer(raw[:12], "<i4")
    width = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[magic, version]
    tokens = np.frombuffer(raw[1024:], width)
    assert len(tokens) == count and not any(raw[12:1024])
    return tokens


def test_the_file_is_what_transformers_would_write(folder, tmp_path):
    out = tmp_path / "tokens.bin"
    said = tokenize("--tokenizer", folder, "--data", folder / "text", "--out", out, "--separator", END)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = [(folder / "text" / name).read_bytes().decode() for name in ("a.txt", "b/2.txt")]
    end = theirs.convert_tokens_to_ids(END)
    expected = [i for text in texts for i in [*theirs(text)["input_ids"], end]]
    tokens = tokens_of(out)
    assert tokens.dtype == np.uint16 and tokens.tolist() == expected
    assert theirs.decode(tokens) == END.join(texts) + END
    assert f"{len(expected)} tokens of 2 files; the vocabulary has {len(theirs)}" in said
    assert os.listdir(tmp_path) == ["tokens.bin"]
    inspected = json.loads(run_sluice("inspect", "--json", out).stdout)
    assert inspected["tokens"] == len(expected)


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    words = {f"w{i}": i for i in range(70000)} | {"<unk>": 70000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("w69999")
    tokenize("--tokenizer", tmp_path / "tokenizer.json", "--data", tmp_path / "text", "--out", tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin").dtype == np.uint32 and tokens_of(tmp_path / "t.bin").tolist() == [69999]


def test_an_existing_file_stays_unless_it_is_to_be_replaced(folder, refused, tmp_path):
    out = tmp_path / "tokens.bin"
    out.write_bytes(b"mine")
    words = ["--tokenizer", folder, "--data", folder / "text" / "a.txt", "--out", out]
    assert "--force" in refused("tokenize", *words) and out.read_bytes() == b"mine"
    tokenize(*words, "--force")
    assert len(tokens_of(out)) > 1000 and os.listdir(tmp_path) == ["tokens.bin"]


def refusals(folder, tmp_path):
    (tmp_path / "latin").write_bytes(b"x" * (2**20 + 5) + b"\xe9" + b"y" * 10)
    (tmp_path / "cut").write_bytes("é".encode()[:1])
    (tmp_path / "none").mkdir()
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    text = folder / "text" / "a.txt"
    given = {"--tokenizer": folder, "--data": text, "--out": tmp_path / "t.bin"}
    yield given | {"--data": tmp_path / "latin"}, "is not UTF-8", "at byte 1048581"
    yield given | {"--data": tmp_path / "cut"}, "is not UTF-8", "at byte 0"
    yield given | {"--data": tmp_path / "nowhere"}, "does not exist"
    yield given | {"--data": tmp_path / "none"}, "holds no text"
    yield given | {"--data": folder / "text" / "binary"}, "is no text"
    yield given | {"--tokenizer": tmp_path}, "tokenizer.json' does not exist", "save_pretrained"
    yield given | {"--tokenizer": tmp_path / "bad.json"}, "bad.json' is no tokenizer"
    yield given | {"--out": tmp_path / "t.txt"}, "ending .bin"
    yield given | {"--out": tmp_path / "nodir" / "t.bin"}, "nodir' does not exist; make it"
    yield given | {"--out": tmp_path / "folder.bin"}, "folder.bin', which is a folder"
    yield given | {"--separator": "<none>"}, "'<none>'"
    yield given | {"--sep": "x"}, "unrecognized arguments: --sep"


def test_refusals_say_why_and_leave_nothing(folder, refused, tmp_path):
    for given, *parts in refusals(folder, tmp_path):
        before = sorted(os.listdir(tmp_path))
        told = refused("tokenize", "--progress", "none", *[word for pair in given.items() for word in pair])
        assert all(part in told for part in parts), told
        assert sorted(os.listdir(tmp_path)) == before


def test_an_unknown_command_is_told_all_that_there_are(refused):
    assert refused("nonsense").strip() == run_sluice("nonsense").stderr.decode().strip() + ", tokenize"


def test_without_the_library_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(sluice.LibraryError, match="pip install tokenizers"):
        _tokenizer.load(folder)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_leaves_nothing_behind(folder, tmp_path, number, status):
    (tmp_path / "text").write_text("\n".join(lesson()) * 30)
    command = [sys.executable, "-m", "sluice", "tokenize", "--tokenizer", folder, "--data", tmp_path / "text"]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    process = subprocess.Popen([*command, "--out", tmp_path / "t.bin", "--progress", "none"], env=environment)
    deadline = time.monotonic() + 60
    while not any(".partial-" in name for name in os.listdir(tmp_path)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(timeout=60) == status
    assert os.listdir(tmp_path) == ["text"]


# ---- generation ----


def test_text_that_comes_by_tokens_is_the_text_of_all():
    tokenizer = make_tokenizer("gpt2")
    text = "the café 🙂🙂 日本 end"
    ids = tokenizer.encode(text).ids
    decoder = _tokenizer.Decoder(tokenizer, ids[:2])
    parts = [decoder.add(token) for token in ids[2:]]
    assert tokenizer.decode(ids[:2]) + "".join(parts) == text and "" in parts and "\ufffd" not in "".join(parts)
    cut = _tokenizer.Decoder(tokenizer, [])
    assert cut.add(tokenizer.encode("🙂").ids[0]) == "" and cut.end() == "\ufffd"


def test_a_model_learns_from_the_file_and_generation_takes_and_gives_text(folder, refused, tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    kind, config = gpt2(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)
    model = kind(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt = "The engine's plan"
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    text, out = folder / "text" / "a.txt", tmp_path / "tokens.bin"
    tokenize("--tokenizer", tmp_path, "--data", text, "--out", out)
    trained = sluice.train(model=tmp_path, data=out, steps=1, seq=16, batch=2, memory="512MiB", progress="none")
    assert trained.steps == 1
    words = ["generate", "--checkpoint", tmp_path, "--prompt", prompt, "--tokens", 20, "--temperature", 0]
    done = sluice_module(*words, "--tokenizer", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == tokenizer.decode(made[0]) + "\n"
    assert "one --prompt" in refused(*words, "--tokenizer", tmp_path, "--output", "tokens")
    for given, what in ((["--prompt="], "makes no token; give a text"), (["--prompt", "-x"], "--prompt=-x")):
        assert what in refused("generate", "--checkpoint", tmp_path, "--tokenizer", tmp_path, *given)
    wrong = sluice_module(*words, "--tokenizer", tmp_path, "--top-p", 2)
    assert wrong.returncode == 2 and "top-p" in wrong.stderr and wrong.stdout == ""
