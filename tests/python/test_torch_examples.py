"""The example programs run as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from sluice_package import PACKAGE

EXAMPLES = PACKAGE / "examples"


def run(program, *arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments), "--memory", "3GiB", "--disk", str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text_in(folder):
    (folder / "text.txt").write_text("What is written here is read again and again. " * 100)
    return folder / "text.txt"


def llama_in(folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return folder / "llama"


def test_pretraining(tmp_path):
    given = ["--layers", 2, "--width", 64, "--steps", 4, "--seq", 32, "--batch", 2, "--out", "run"]
    assert "step 4/4" in run("pretrain_gpt2.py", text_in(tmp_path), *given, folder=tmp_path)
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoint").glob("step-*/manifest.json"))


def test_fine_tuning(tmp_path):
    folder = llama_in(tmp_path)
    run("finetune_llama.py", folder, text_in(tmp_path), "--steps", 4, "--seq", 32, "--out", "tuned", folder=tmp_path)
    before = transformers.LlamaForCausalLM.from_pretrained(folder)
    after = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_lora(tmp_path):
    found = run(
        "lora.py", llama_in(tmp_path), text_in(tmp_path), "--steps", 31, "--seq", 32, "--out", "adapter", folder=tmp_path
    )
    losses = [float(line.rsplit(" ", 1)[1]) for line in found.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] < 6
    assert (Path(tmp_path) / "adapter" / "adapter_model.safetensors").exists()


def test_an_image_classifier(tmp_path):
    assert "step 3/3" in run("image_classifier.py", "--steps", 3, "--batch", 4, folder=tmp_path)
