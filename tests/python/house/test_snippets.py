"""The Python snippets of the README and of the guide run as they are, but with another folder than /nvme and smaller models."""

import os
import re
import subprocess

import pytest
from support import warm_python
from support.sluice_process import PACKAGE, SOURCE

SMALLER = {"/nvme:8GiB": "DISK:1GiB", "/nvme": "DISK", "GPT2Config()": "GPT2Config(n_layer=2, n_embd=64, n_head=2)"}
SMALLER |= {"gpt2-124m": "tiny", "steps=100": "steps=2, batch=2, seq=32", "(8, 128)": "(4, 16)", "(64, 128)": "(16, 16)"}


def snippets():
    for document in (SOURCE / "README.md", *sorted((SOURCE / "docs" / "guide").glob("*.md"))):
        for count, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
        ):
            yield pytest.param(code, id=f"{document.relative_to(SOURCE)}-{count}")


@pytest.mark.parametrize("code", list(snippets()))
def test_a_snippet_runs(code, tmp_path):
    for what, other in SMALLER.items():
        code = code.replace(what, other)
    for folder in ("DISK", "books"):
        (tmp_path / folder).mkdir()
    for text in ("book.txt", "books/a.txt"):
        (tmp_path / text).write_text("What is written here is read again and again. " * 100)
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "2"}
    strict = "import warnings\nwarnings.simplefilter('error', RuntimeWarning)\n"
    done = subprocess.run([warm_python.executable(), "-c", strict + code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_there_are_snippets():
    assert len(list(snippets())) == 7
