"""Parses the options of commands that are written in Python."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .errors import InvalidArgumentError


class Parser(argparse.ArgumentParser):
    """Raises InvalidArgumentError, which ends with `advice`, for wrong options."""

    def __init__(self, advice: str, **given: Any) -> None:
        super().__init__(**given)
        self._advice = advice

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}; {self._advice}")
