"""The example programs run as a user would run them."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from support import fake_gpu, warm_python
from support.sluice_process import PACKAGE, SOURCE, TESTS

EXAMPLES = SOURCE / "examples"


def start(program, *arguments, folder, by=()):
    paths = os.pathsep.join(map(str, (PACKAGE, EXAMPLES, TESTS)))
    threads = "1" if "--nproc-per-node" in by else "2"  # of each rank
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive",
                   "PYTHON_EXEC": warm_python.executable()}
    command = [warm_python.executable(), *by, str(EXAMPLES / program), *map(str, arguments), "--memory", "3GiB", "--disk", str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def run(program, *arguments, folder, by=()):
    done = start(program, *arguments, folder=folder, by=by)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(printed):
    # Ranks print into one pipe, so that two of their lines may stand in one.
    return [float(loss) for loss in re.findall(r"loss\D*(\d+\.\d{4})", printed)]


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
        "lora.py", llama_in(tmp_path), text_in(tmp_path), "--steps", 21, "--seq", 32, "--out", "adapter", folder=tmp_path
    )
    losses = losses_of(found)
    assert losses[-1] < losses[0] < 6
    assert (Path(tmp_path) / "adapter" / "adapter_model.safetensors").exists()


def test_a_text_that_is_too_short_says_so(tmp_path):
    folder = llama_in(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    for program, *words in (["pretrain_gpt2.py"], ["finetune_llama.py", folder], ["lora.py", folder]):
        done = start(program, *words, "short.txt", "--seq", 32, folder=tmp_path)
        assert done.returncode == 1 and "'short.txt' has 9 " in done.stderr and "Traceback" not in done.stderr


def test_an_image_classifier(tmp_path):
    assert "step 3/3" in run("image_classifier.py", "--steps", 3, "--batch", 4, folder=tmp_path)


def test_fine_tuning_in_a_plain_loop(tmp_path):
    losses = losses_of(run("finetune.py", "--steps", 12, "--out", "tuned", folder=tmp_path))
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    again = run("finetune.py", "--model", "tuned", "--steps", 2, "--out", "again", folder=tmp_path)
    assert losses_of(again)[0] < 0.9 * losses[0]
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "again")


def test_ranks(tmp_path):
    by = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = losses_of(run("ranks.py", folder=tmp_path, by=by))
    assert len(losses) == 8 and max(losses[-2:]) < min(losses[:2])


ON_THE_FAKE_CARD = (
    "import runpy, sys; from support import fake_gpu; fake_gpu.share_memory(memory=64 << 30, schedule='early', devices=2); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def test_ranks_on_gpus(tmp_path):
    fake_gpu.require_built()
    (tmp_path / "on_fake_cards.py").write_text(ON_THE_FAKE_CARD)
    by = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "on_fake_cards.py")]
    losses = losses_of(run("ranks.py", "--device-memory", "4GiB", folder=tmp_path, by=by))
    assert len(losses) == 8 and max(losses[-2:]) < min(losses[:2])


def test_a_gpu(tmp_path):
    by = []
    if not torch.cuda.is_available():
        fake_gpu.require_built()
        by = ["-c", ON_THE_FAKE_CARD]
    losses = losses_of(run("gpu.py", "--steps", 6, folder=tmp_path, by=by))
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_so(tmp_path):
    done = start("gpu.py", folder=tmp_path)
    assert done.returncode == 1 and "finds no GPU" in done.stderr and "Traceback" not in done.stderr
