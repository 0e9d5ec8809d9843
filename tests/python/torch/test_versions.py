"""Libraries that are too old for sluice.torch are named before anything else fails."""

import importlib
import sys
import types

import pytest
import torch

import sluice.torch
from sluice._library import check_version


@pytest.mark.parametrize("found", ["2.10.0", "2.10.0a0+git1234", "2.14.1+cu130", "3.0"])
def test_new_enough(found):
    library = types.ModuleType("torch")
    library.__version__ = found
    check_version(library, "this")


def test_an_older_pytorch_is_refused_at_the_import(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.delitem(sys.modules, "sluice.torch")
    with pytest.raises(ImportError, match=r"sluice\.torch needs torch 2\.10 or later, and this Python has 2\.9\.1\+cu128 .*pip install"):
        importlib.import_module("sluice.torch")


def test_older_transformers_are_refused_where_they_are_needed(monkeypatch, tmp_path):
    # By its name: processing_utils of transformers puts another module of that name into sys.modules.
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"from_pretrained\(\) needs transformers 5\.1 or later, and this Python has 4\.57\.6"):
        sluice.torch.from_pretrained(tmp_path, memory="1GiB")
