"""`python -m sluice`: all commands of the program `sluice`, and the commands that need a tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys

from . import _generate, _tokenize
from ._library import find_program
from .errors import BudgetError, CorruptError, Error, InvalidArgumentError, NotFiniteError, NotFoundError

_OF_THE_PROGRAM = ("train", "plan", "generate", "inspect", "doctor", "bench")
_MORE_HELP = """
In Python also:
  tokenize                    make a token file of text with a model's tokenizer
  generate --tokenizer FOLDER generate text from text for a model whose tokens are not bytes
"""


def _status(error: Exception) -> int:
    """The program's exit status for such an error (bindings/cli/README.md)."""
    if isinstance(error, BudgetError):
        return 3
    return 2 if isinstance(error, (InvalidArgumentError, NotFoundError, CorruptError, NotFiniteError)) else 1


def _run(words: list[str]) -> int:
    if words[:1] == ["tokenize"]:
        _tokenize.main(words[1:])
        return 0
    if words[:1] == ["generate"] and any(word.split("=")[0] == _generate.FLAG for word in words):
        return _generate.main(words[1:])
    if words and not words[0].startswith("-") and words[0] not in _OF_THE_PROGRAM:
        raise InvalidArgumentError(f"'{words[0]}' is not one of {', '.join([*_OF_THE_PROGRAM, 'tokenize'])}")
    program = find_program()
    if words[:1] in (["--help"], ["-h"]):
        status = subprocess.run([program, *words]).returncode
        print(_MORE_HELP, end="")
        return status
    os.execv(program, [str(program), *words])  # so that the program gets signals and determines the exit status


def main() -> None:
    """Ends the process with the command's exit status."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except (Error, OSError) as error:
        print(f"sluice: error: {error}", file=sys.stderr)
        sys.exit(_status(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
