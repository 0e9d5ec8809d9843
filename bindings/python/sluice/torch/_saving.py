"""save_pretrained() of wrapped models, which brings in one parameter after another."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import StateError
from ._safetensors import save_file

_substituting = threading.RLock()

Reading = Callable[[], contextlib.AbstractContextManager[None]]


def install(model: torch.nn.Module, reading: Reading) -> None:
    """Makes save_pretrained() of a model and its modules write by save_file(). reading: a `with` in which parameters can be
    read."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__.setdefault("save_pretrained", functools.partial(_save_pretrained, module, reading))


def uninstall(model: torch.nn.Module) -> None:
    """Undoes install()."""
    for module in model.modules():
        saving = module.__dict__.get("save_pretrained")
        if isinstance(saving, functools.partial) and saving.func is _save_pretrained:
            del module.__dict__["save_pretrained"]


def _save_pretrained(module: torch.nn.Module, reading: Reading, *args: Any, **kwargs: Any) -> Any:
    """Runs the library's own save_pretrained(), which decides what to save in which files, and meanwhile replaces the name
    by which it calls safetensors' save_file(), which leaves reading to the system."""
    function = type(module).save_pretrained  # type: ignore[attr-defined]
    names = inspect.unwrap(function).__globals__
    with reading(), _substituted(names):
        try:
            return function(module, *args, **kwargs)
        except Exception as error:
            if "os error 14" not in str(error):
                raise
            raise StateError(
                f"{type(module).__name__}.save_pretrained() lets the system read parameters that are on disk ({error}); "
                "save with sluice.torch.save_file(model.state_dict(), path)"
            ) from error


@contextlib.contextmanager
def _substituted(names: dict[str, Any]) -> Iterator[None]:
    if "safe_save_file" not in names:
        yield
        return
    with _substituting:
        original, names["safe_save_file"] = names["safe_save_file"], save_file
        try:
            yield
        finally:
            names["safe_save_file"] = original
