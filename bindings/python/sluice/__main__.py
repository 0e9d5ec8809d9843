"""`python -m sluice`: every command of the program `sluice`, which takes this process's place."""

from __future__ import annotations

import os
import sys

from ._library import find_program
from .errors import LibraryError


def main() -> None:
    """Does not return: arguments, signals and the exit status are the program's own."""
    try:
        program = find_program()
        os.execv(program, [str(program), *sys.argv[1:]])
    except (LibraryError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
