"""Finds and loads libsluice_c.so and NCCL, finds the program `sluice`, and checks the versions of PyTorch and transformers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

from . import _abi
from .errors import LibraryError

LIBRARY = "libsluice_c.so"
VARIABLE = "SLUICE_LIBRARY_PATH"
_OLDEST = {"torch": (2, 10), "transformers": (5, 1)}  # that wrapped models work with
_PACKAGE = Path(__file__).resolve().parent


def _places() -> list[Path]:
    """The paths at which the library may be, in order of preference."""
    places = [_PACKAGE / LIBRARY]
    if given := os.environ.get(VARIABLE):
        path = Path(given).absolute()
        return places + [path / LIBRARY if path.is_dir() else path]
    return places + [_PACKAGE.parents[2] / "build" / "lib" / LIBRARY]


def find_library() -> Path:
    """Returns the library in the package, else that of SLUICE_LIBRARY_PATH (the file or its folder), else that of the
    source tree that contains the package."""
    places = _places()
    for path in places:
        if path.is_file():
            return path
    tried = ", ".join(f"'{path}'" for path in places)
    raise LibraryError(
        f"{LIBRARY} was not found; looked for {tried}. Build it (scripts/build.sh in a checkout), "
        f"or set {VARIABLE} to the folder that it is in"
    )


def find_program() -> Path:
    """Returns the path of the program `sluice`: beside the library, or in the folder `bin` next to the library's."""
    folder = find_library().parent
    places = [folder / "sluice", folder.parent / "bin" / "sluice"]
    for path in places:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    tried = " and ".join(f"'{path}'" for path in places)
    raise LibraryError(
        f"the program sluice was not found beside {LIBRARY}; looked for {tried}. Build it with scripts/build.sh"
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library, once. Its functions release the GIL while they run."""
    path = find_library()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"'{path}' could not be loaded: {error}") from error
    try:
        found = _abi.version_of(loaded)
        if found == _abi.VERSION:
            return _abi.declare(loaded)
    except AttributeError as error:
        raise LibraryError(f"'{path}' is not Sluice's library: {error}") from error
    raise LibraryError(
        f"'{path}' has version {found} of the C ABI, and this package needs {_abi.VERSION}; "
        "use the library that was built with the package"
    )


@functools.cache
def load_nccl() -> None:
    """Loads the NCCL of NVIDIA's Python package, if that is installed, so that the library finds it in the process, as it finds PyTorch's. Where
    SLUICE_NCCL names another one, or there is none, does nothing."""
    if os.environ.get("SLUICE_NCCL") or (nvidia := importlib.util.find_spec("nvidia")) is None:
        return
    for folder in nvidia.submodule_search_locations or ():
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path))
            return


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
