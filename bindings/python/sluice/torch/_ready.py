"""How long the phases of making a wrapped model ready take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Ready:
    """The seconds of each phase, by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside of the `with` is the phase, or more of it."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
