"""scripts/docs.sh makes a reference that has what users call."""

import importlib.util
import os
import re
import shutil
import subprocess

import pytest
from support import warm_python
from support.sluice_process import PACKAGE, SOURCE


@pytest.mark.skipif(shutil.which("doxygen") is None, reason="there is no doxygen (scripts/setup.sh --clang)")
@pytest.mark.skipif(importlib.util.find_spec("pdoc") is None, reason="there is no pdoc (scripts/setup.sh --python)")
def test_the_reference_has_what_users_call(tmp_path):
    command = [SOURCE / "scripts" / "docs.sh", tmp_path]
    done = subprocess.run(command, env=os.environ | {"SLUICE_PYTHON": warm_python.executable()}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    header = "".join(path.read_text() for path in (SOURCE / "bindings" / "c").glob("sluice*.h"))
    functions = re.findall(r"^SLUICE_API [^(;]*?(sluice_\w+)\(", header, re.MULTILINE)
    pages = "".join(path.read_text() for path in (tmp_path / "c").glob("sluice*_8h.html"))
    assert len(functions) > 30 and [name for name in functions if name not in pages] == []
    assert "Ends the step: updates every parameter that has a gradient" in pages  # comments are descriptions
    page = (tmp_path / "python" / "sluice" / "torch.html").read_text()
    named = re.findall(r'^    "(\w+)",$', (PACKAGE / "sluice" / "torch" / "__init__.py").read_text(), re.MULTILINE)
    assert len(named) > 10 and [name for name in named if f'id="{name}"' not in page] == []
