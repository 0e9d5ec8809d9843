"""Finds and reads the text files to tokenize (docs/formats/tokens.md)."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Sequence

from .errors import InvalidArgumentError, NotFoundError
from .model import Path

_PROBE = 4096
_CHUNK = 1 << 20  # bytes


def find(paths: Sequence[Path]) -> list[str]:
    """Returns the text files among the paths and in the folders, in their order."""
    found = []
    for path in [os.fspath(path) for path in paths]:
        if os.path.isdir(path):
            files = [file for file in sorted(_below(path), key=os.fsencode) if _is_text(file)]
            if not files:
                raise InvalidArgumentError(f"the folder '{path}' holds no text: only hidden, empty or binary files")
            found += files
        elif not os.path.exists(path):
            raise NotFoundError(f"'{path}' does not exist; --data takes text files and folders")
        elif not os.path.isfile(path):
            raise InvalidArgumentError(f"'{path}' is neither a file nor a folder")
        elif not _is_text(path):
            raise InvalidArgumentError(f"'{path}' is no text: it is empty or has a zero byte in its first {_PROBE}")
        else:
            found.append(path)
    return found


def _below(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and os.path.isfile(os.path.join(parent, name)):
                yield os.path.join(parent, name)


def _is_text(file: str) -> bool:
    with open(file, "rb") as opened:
        probe = opened.read(_PROBE)
    return probe != b"" and b"\0" not in probe


def chunks(file: str, told: Callable[[int], object]) -> Iterator[str]:
    """Yields the text of a UTF-8 file in chunks, with unchanged line ends. Calls `told` with the number of bytes of
    each chunk."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0  # bytes before the chunk
    with open(file, "rb") as opened:
        while True:
            chunk = opened.read(_CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(
                    f"'{file}' is not UTF-8: {error.reason} at byte {done - pending + error.start}; convert it first"
                ) from error
            if not chunk:
                return
            done += len(chunk)
            told(len(chunk))
            yield text
