"""`python -m sluice tokenize`: converts text files to a token file that `sluice train` reads."""

from __future__ import annotations

import argparse
import array
import codecs
import contextlib
import os
import secrets
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NoReturn

from . import _pieces, _tokenizer
from .errors import InvalidArgumentError, NotFoundError
from .model import Path

_HEADER = 256 * 4
_MOST = 2**31 - 1  # the most tokens that the header can count
_PROBE = 4096
_CHUNK = 1 << 20  # bytes


class Parser(argparse.ArgumentParser):
    """Raises InvalidArgumentError, which ends with `advice`, for wrong options."""

    def __init__(self, advice: str, **given: Any) -> None:
        super().__init__(**given)
        self._advice = advice

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}; {self._advice}")


class _TokenFile:
    """A token file of llm.c (docs/formats/tokens.md) for a `with`. finish() makes it appear, complete; without finish()
    no file appears."""

    def __init__(self, path: str, largest: int, force: bool) -> None:
        if not path.endswith(".bin"):
            raise InvalidArgumentError(f"--out is '{path}'; sluice train knows token files by the ending .bin")
        self.tokens = 0
        self._path, self._force = path, force
        self._kind, self._type = ((20240520, 1), "H") if largest < 2**16 else ((20240801, 7), "I")
        folder, name = os.path.split(path)
        self._folder = folder or "."
        self._refuse_folders()
        self._refuse_existing()
        self._partial = os.path.join(self._folder, f".{name}.partial-{secrets.token_hex(8)}")
        self._file: BinaryIO | None = None

    def add(self, ids: Sequence[int]) -> None:
        self.tokens += len(ids)
        if self.tokens > _MOST:
            raise InvalidArgumentError(
                f"a token file holds {_MOST} tokens at most, and this data has more; make several, all of which "
                "sluice train --data takes"
            )
        self._opened().write(array.array(self._type, ids).tobytes())

    def finish(self) -> None:
        """Writes everything to the disk, and gives the file its name."""
        file = self._opened()
        file.seek(0)
        file.write(struct.pack("<3i", *self._kind, self.tokens))
        file.flush()
        os.fsync(file.fileno())
        self._refuse_existing()  # another process may have made one meanwhile
        os.rename(self._partial, self._path)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _opened(self) -> BinaryIO:
        """Makes the file; it is called inside the `with`, whose end removes an unfinished file."""
        if self._file is None:
            self._file = open(self._partial, "xb")
            self._file.write(bytes(_HEADER))
        return self._file

    def _refuse_existing(self) -> None:
        if not self._force and os.path.lexists(self._path):
            raise InvalidArgumentError(f"'{self._path}' exists; give another --out, or --force to replace it")

    def _refuse_folders(self) -> None:
        """Refuses folders that cannot be written to, before anything is tokenized."""
        if not os.path.isdir(self._folder):
            raise InvalidArgumentError(
                f"--out is '{self._path}', and the folder '{self._folder}' does not exist; make it, or give another --out"
            )
        if os.path.isdir(self._path):
            raise InvalidArgumentError(f"--out is '{self._path}', which is a folder; give a file in it")

    def __enter__(self) -> _TokenFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the write error was raised already
                self._file.close()
        with contextlib.suppress(FileNotFoundError):  # the file has its name
            os.unlink(self._partial)


class _Progress:
    """Prints one line to the standard error at most every second; on a terminal it rewrites the line."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._done, self._start, self._last = 0, time.monotonic(), time.monotonic()
        self._terminal = sys.stderr.isatty()

    def read(self, count: int) -> None:
        self._done += count

    def tokens(self, count: int) -> None:
        now = time.monotonic()
        if not self._shown or now - self._last < 1:
            return
        self._last = now
        rate = self._done / (now - self._start)
        text = (
            f"{100 * self._done / self._total:.0f}%  {count} tokens  {rate / 1e6:.1f} MB/s  "
            f"{(self._total - self._done) / rate:.0f}s left"
        )
        print(f"\r{text}\x1b[K" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def finish(self) -> None:
        if self._shown and self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sluice tokenize",
        description="Makes a token file (.bin) of text with a model's tokenizer, for sluice train --data.",
        allow_abbrev=False,
        advice="see python -m sluice tokenize --help",
    )
    texts = {
        "--tokenizer": "a folder of Hugging Face with a tokenizer.json",
        "--out": "the FILE.bin to write, whole or not at all",
        "--separator": "a token that ends each file, such as '<|endoftext|>'",
    }
    for flag, help in texts.items():
        parser.add_argument(flag, metavar="TEXT", required=flag != "--separator", help=help)
    parser.add_argument(
        "--data", metavar="TEXT", nargs="+", action="extend", required=True, help="text files in UTF-8, and folders"
    )
    parser.add_argument("--force", action="store_true", help="replace --out where it exists")
    parser.add_argument("--progress", choices=["auto", "none"], default="auto", help="whether progress is shown")
    return parser


def _find(paths: Sequence[Path]) -> list[str]:
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


def _chunks(file: str, told: Callable[[int], object]) -> Iterator[str]:
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


def _separator(tokenizer: Any, name: str | None) -> list[int]:
    if name is None:
        return []
    token = tokenizer.token_to_id(name)
    if token is None:
        raise InvalidArgumentError(f"--separator is '{name}', which the tokenizer does not have; name a token of it")
    return [token]


def _runs(tokenizer: Any, files: Sequence[str], separator: list[int], progress: _Progress) -> Iterator[list[int]]:
    for file in files:
        yield from _pieces.encode(tokenizer, _chunks(file, progress.read))
        yield separator


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that no incomplete file is left."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(words: Sequence[str]) -> None:
    """Runs the command with these words. Raises sluice.Error, and OSError of files."""
    given = _parser().parse_args(words)
    tokenizer = _tokenizer.load(given.tokenizer)
    separator = _separator(tokenizer, given.separator)
    files = _find(given.data)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    progress = _Progress(sum(map(os.path.getsize, files)), given.progress == "auto")
    with _ended_by_sigterm(), _TokenFile(given.out, largest, given.force) as out:
        for ids in _runs(tokenizer, files, separator, progress):
            out.add(ids)
            progress.tokens(out.tokens)
        out.finish()
    progress.finish()
    print(f"{given.out}: {out.tokens} tokens of {len(files)} files; the vocabulary has {largest + 1}")
