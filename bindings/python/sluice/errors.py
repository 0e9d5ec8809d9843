"""The exceptions of the package: one for each status of the C ABI, with the engine's own text."""

from __future__ import annotations


class Error(Exception):
    """What went wrong in Sluice; its text says what was asked, what was found and what to do."""


class LibraryError(Error, ImportError):
    """The engine's library or program is missing, or is of another version than this package."""


class InvalidArgumentError(Error, ValueError):
    """What was asked for is not valid; nothing was changed."""


class NotFoundError(Error, FileNotFoundError):
    """A named file or tensor does not exist."""


class BudgetError(Error, MemoryError):
    """It does not fit in the memory or the disk space that was stated."""


class SystemIOError(Error, OSError):
    """The system refused or failed an operation."""


class CorruptError(Error):
    """Bytes that were read are not what was written, or not of the expected format."""


class NotFiniteError(Error, ArithmeticError):
    """A gradient is infinite or not a number; no parameter was changed."""


class StateError(Error, RuntimeError):
    """A call that is not allowed now, or an engine that has failed or was closed."""


class InternalError(Error):
    """A defect in Sluice."""


_BY_STATUS: dict[int, type[Error]] = {
    1: InvalidArgumentError,
    2: NotFoundError,
    3: BudgetError,
    4: SystemIOError,
    5: CorruptError,
    6: NotFiniteError,
    7: StateError,
}

_NAMES = {
    "invalid_argument": 1,
    "not_found": 2,
    "budget": 3,
    "io": 4,
    "corrupt": 5,
    "not_finite": 6,
    "state": 7,
}


def error_named(name: str, text: str) -> Error:
    """The exception for an error as `sluice --errors json` names it."""
    return error_of(_NAMES.get(name, 0), text)


def error_of(status: int, text: str) -> Error:
    """The exception for a status of the C ABI that is not SLUICE_OK."""
    return _BY_STATUS.get(status, InternalError)(text)
