"""Computes the tokens of a text of any length from pieces of it, with the same result as if the text were encoded
whole.

The tokens of a character depend on the text around it (a word, blanks, letters that are merged), by rules of the tokenizer
that are not known here. So a text is cut where two things hold with `margin` characters on both sides: no token spans the
cut, and the text after it has the same tokens when its encoding begins at the cut. A piece is then encoded with the margin
that follows it. The margin's tokens are left out, but must be those with which the next piece begins; otherwise the two
pieces are encoded as one. Only a tokenizer that looks further than the margin, without any effect within it, could give
other tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from .errors import InvalidArgumentError

PIECE = 1 << 18  # characters
MARGIN = 1 << 12
LONGEST = 1 << 23  # the most characters without a possible cut
_TRIES = 16  # number of cuts to try near one position before the next position
_AT_ONCE = min(os.cpu_count() or 1, 16)  # number of pieces that are encoded concurrently, each on its thread


@dataclasses.dataclass(frozen=True)
class _Piece:
    text: str
    end: int  # where the piece ends; the margin follows it in `text`
    next: int  # where the next piece begins: at `end`, or behind a blank that the tokenizer puts before any text


def encode(tokenizer: Any, chunks: Iterable[str], piece: int = PIECE, margin: int = MARGIN) -> Iterator[list[int]]:
    """Yields the token ids of all chunks together, in lists. Special tokens in the text are recognised, and none are
    added."""
    held: _Piece | None = None
    held_encoding: Any = None
    for found, encoding in _encoded(tokenizer, _pieces(tokenizer, chunks, piece, margin)):
        if held is not None:
            ids = _ids_before(held, held_encoding, encoding, margin)
            if ids is None:
                found = _joined(held, found)
                encoding = tokenizer.encode(found.text, add_special_tokens=False)
            else:
                yield ids
        held, held_encoding = found, encoding
    if held is not None:
        yield held_encoding.ids


def _encoded(tokenizer: Any, pieces: Iterator[_Piece]) -> Iterator[tuple[_Piece, Any]]:
    while batch := list(itertools.islice(pieces, _AT_ONCE)):
        yield from zip(batch, tokenizer.encode_batch([p.text for p in batch], add_special_tokens=False), strict=True)


def _pieces(tokenizer: Any, chunks: Iterable[str], size: int, margin: int) -> Iterator[_Piece]:
    text, at = "", size
    for chunk in chunks:
        text += chunk
        while len(text) >= at + margin:
            cut = _cut(tokenizer, text[at - margin : at + margin], margin)
            if cut is None:
                at += margin // 2
                _check_length(at)
                continue
            end, following = at - margin + cut[0], at - margin + cut[1]
            yield _Piece(text[: following + margin], end, following)
            text, at = text[following:], size
    if text:
        yield _Piece(text, len(text), len(text))


def _cut(tokenizer: Any, around: str, margin: int) -> tuple[int, int] | None:
    """Finds a cut after the middle of a text: where the left piece ends and the right one begins."""
    encoding = tokenizer.encode(around, add_special_tokens=False)
    ids, offsets = encoding.ids, encoding.offsets
    behind = (j for j in range(1, len(ids)) if margin <= offsets[j][0] < margin + margin // 2)
    for j in itertools.islice((j for j in behind if offsets[j - 1][1] <= offsets[j][0]), _TRIES):
        # Blanks that no token covers belong to the right piece. The first blank may also be one that the tokenizer
        # adds.
        start = offsets[j - 1][1]
        for following in (start, start + 1) if around[start] == " " else (start,):
            if tokenizer.encode(around[following:], add_special_tokens=False).ids == ids[j:]:
                return start, following
    return None


def _ids_before(piece: _Piece, encoding: Any, following: Any, margin: int) -> list[int] | None:
    """Returns the tokens before the piece's end, or None where the tokens after it are not the first of the next
    piece."""
    first = _token_behind(encoding, piece.end, len(piece.text))
    last = _token_behind(encoding, piece.next + margin // 2, len(piece.text))
    if first is None or last is None or encoding.token_to_chars(first)[0] < piece.end:
        return None
    if first > 0 and encoding.token_to_chars(first - 1)[1] > piece.end:
        return None
    same: bool = encoding.ids[first:last] == following.ids[: last - first]
    return encoding.ids[:first] if same and last > first else None


def _token_behind(encoding: Any, character: int, end: int) -> int | None:
    """Returns the first token that begins at this character or after it."""
    found = (encoding.char_to_token(at) for at in range(character, end))
    return next((token for token in found if token is not None), None)


def _joined(left: _Piece, right: _Piece) -> _Piece:
    _check_length(left.next + right.end)
    return _Piece(left.text[: left.next] + right.text, left.next + right.end, left.next + right.next)


def _check_length(characters: int) -> None:
    if characters > LONGEST:
        raise InvalidArgumentError(
            f"{LONGEST} characters of text cannot be cut anywhere without changing their tokens; give text with words or "
            "lines in it"
        )
