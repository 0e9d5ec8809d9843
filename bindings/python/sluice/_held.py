"""A unit that is held."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .errors import StateError

if TYPE_CHECKING:
    from .engine import Engine


class Held:
    """A unit that is held, until release() or the end of its `with`."""

    def __init__(self, engine: Engine, unit: int) -> None:
        self._engine, self._unit, self._released = engine, unit, False

    def release(self) -> None:
        """Releases the unit, once; views of its parameters become invalid when no other acquire() holds it."""
        if self._released:
            raise StateError(f"'{self._engine.units[self._unit].name}' is released and was not acquired again")
        self._engine._release(self._unit)
        self._released = True

    def __enter__(self) -> Held:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self._released and not self._engine.closed:
            self.release()
