"""The oldest versions of PyTorch and transformers that wrapped models work with."""

from __future__ import annotations

import os
import re
from types import ModuleType

_OLDEST = {"torch": (2, 10), "transformers": (5, 1)}


def check_version(library: ModuleType, what: str) -> None:
    """Raises ImportError where the library, of which this needs a newer version, is an older one. what: what needs it."""
    name, found = library.__name__, str(getattr(library, "__version__", "0"))
    oldest = _OLDEST[name]
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
        wanted = ".".join(map(str, oldest))
        raise ImportError(
            f"{what} needs {name} {wanted} or later, and this Python has {found} ('{os.path.dirname(library.__file__ or '')}'): "
            f"pip install --upgrade '{name}>={wanted}'"
        )
