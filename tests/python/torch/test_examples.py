"""The example programs run as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support.sluice_process import PACKAGE

EXAMPLES = PACKAGE / "examples"


def start(program, *arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments), "--memory", "3GiB", "--disk", str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def run(program, *arguments, folder):
    done = start(program, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text_in(folder):
    (folder / "text.txt").write_text("What is written here is read again and again. " * 100)
    return folder / "text.txt"


def llama_in(folder, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "llama")
    return folder / "llama"


def test_pretraining(tmp_path):
    given = ["--layers", 2, "--width", 64, "--steps", 4, "--seq", 32, "--batch", 2, "--out", "run"]
    assert "step 4/4" in run("pretrain_gpt2.py", text_in(tmp_path), *given, folder=tmp_path)
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoint").glob("step-*/manifest.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fine_tuning(dtype, tmp_path):
    folder = llama_in(tmp_path, dtype)
    run("finetune_llama.py", folder, text_in(tmp_path), "--steps", 4, "--seq", 32, "--out", "tuned", folder=tmp_path)
    before = transformers.LlamaForCausalLM.from_pretrained(folder)
    after = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight) and after.dtype == before.dtype == dtype


def test_lora(tmp_path):
    found = run(
        "lora.py", llama_in(tmp_path), text_in(tmp_path), "--steps", 31, "--seq", 32, "--out", "adapter", folder=tmp_path
    )
    losses = [float(line.rsplit(" ", 1)[1]) for line in found.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] < 6
    assert (Path(tmp_path) / "adapter" / "adapter_model.safetensors").exists()


def test_adapters_of_a_bfloat16_model_take_the_room_of_bfloat16(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from lora import adapted

    types = {name: p.dtype for name, p in adapted(llama_in(tmp_path, torch.bfloat16)).named_parameters()}
    assert {dtype for name, dtype in types.items() if "lora" not in name} == {torch.bfloat16}
    given = ["--steps", 2, "--seq", 32, "--out", "adapter"]
    assert "step 2/2" in run("lora.py", tmp_path / "llama", text_in(tmp_path), *given, folder=tmp_path)


def test_a_text_that_is_too_short_says_so(tmp_path):
    folder = llama_in(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    for program, *words in (["pretrain_gpt2.py"], ["finetune_llama.py", folder], ["lora.py", folder]):
        done = start(program, *words, "short.txt", "--seq", 32, folder=tmp_path)
        assert done.returncode == 1 and "'short.txt' has 9 " in done.stderr and "Traceback" not in done.stderr


def test_an_image_classifier(tmp_path):
    assert "step 3/3" in run("image_classifier.py", "--steps", 3, "--batch", 4, folder=tmp_path)
