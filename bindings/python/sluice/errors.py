"""The exceptions of the package: one for each status of the C ABI, with the engine's own text."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

Called = TypeVar("Called")


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


def knows_its_keywords(called: Called, besides: Iterable[str] = ()) -> Called:
    """Lets a function, or a class when it makes an object, say which of its keyword arguments an unknown one may stand for. besides: those
    that it hands to another function."""
    run: Any = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    own = inspect.signature(run).parameters.values()
    known = {each.name for each in own if each.kind != each.VAR_KEYWORD} - {"self"} | set(besides)
    name_of_called = called.__name__  # type: ignore[attr-defined]

    @functools.wraps(run)
    def checked(*arguments: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                raise unexpected(name_of_called, name, known)
        return run(*arguments, **given)

    if not isinstance(called, type):
        return checked  # type: ignore[return-value]
    called.__init__ = checked  # type: ignore[misc]
    return called


def error_of(status: int, text: str) -> Error:
    """The exception for a status of the C ABI that is not SLUICE_OK."""
    return dict(enumerate(_KINDS.values(), 1)).get(status, InternalError)(text)


def error_named(name: str, text: str) -> Error:
    """The exception for an error of the program, by its name."""
    return _KINDS.get(name, InternalError)(text)
