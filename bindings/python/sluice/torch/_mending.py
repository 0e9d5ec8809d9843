"""After an exception of the keyboard, which may come between a call of the engine and the line that notes it: the engine is
asked what there is."""

from __future__ import annotations

import contextlib

from ..engine import Engine
from ..errors import StateError


def release_everything(engine: Engine) -> None:
    """Releases each unit as often as it is held."""
    for unit in range(len(engine.units)):
        with contextlib.suppress(StateError):  # the engine's, when it is not held any more
            while True:
                engine._handle.call("sluice_engine_release", unit)


def begin_step(engine: Engine) -> None:
    """There is a step after this, the one that there was or another."""
    with contextlib.suppress(StateError):  # the engine's, where one was begun
        engine.begin_step()


def abandon_step(engine: Engine) -> None:
    """There is no step after this."""
    with contextlib.suppress(StateError):  # the engine's, where none was begun
        engine.abandon_step()
