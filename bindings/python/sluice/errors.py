"""The exceptions of the package: one for each status of the C ABI, with the engine's own text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """An error of Sluice, whose text names the request, the finding and the remedy."""


class LibraryError(Error, ImportError):
    """The engine's library or program is missing, or is of another version than this package."""


class InvalidArgumentError(Error, ValueError):
    """An argument of a call is not valid; nothing was changed."""


class NotFoundError(Error, FileNotFoundError):
    """A named file or tensor does not exist."""


class BudgetError(Error, MemoryError):
    """A plan or an allocation does not fit in the stated memory or disk space."""


class SystemIOError(Error, OSError):
    """An operation of the operating system was refused or failed."""


class CorruptError(Error):
    """Bytes that were read are not those that were written, or not of the expected format."""


class NotFiniteError(Error, ArithmeticError):
    """A gradient is infinite or not a number; no parameter was changed."""


class StateError(Error, RuntimeError):
    """A call is not allowed now, or the engine has failed or was closed."""


class InternalError(Error):
    """A defect in Sluice."""


# The exceptions by their names in `sluice --errors json`, in the order of the C ABI's statuses, which begin with 1.
_KINDS: dict[str, type[Error]] = {
    "invalid_argument": InvalidArgumentError,
    "not_found": NotFoundError,
    "budget": BudgetError,
    "io": SystemIOError,
    "corrupt": CorruptError,
    "not_finite": NotFiniteError,
    "state": StateError,
}


def unexpected(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for a keyword argument that a function does not have."""
    near = difflib.get_close_matches(name, names := sorted(known), 1)
    remedy = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}; {remedy}")


def error_of(status: int, text: str) -> Error:
    """The exception for a status of the C ABI that is not SLUICE_OK."""
    return dict(enumerate(_KINDS.values(), 1)).get(status, InternalError)(text)


def error_named(name: str, text: str) -> Error:
    """The exception for an error of the program, by its name."""
    return _KINDS.get(name, InternalError)(text)
