"""Tokens of a text of any length, from pieces of it that are encoded by themselves, as if it were encoded whole.

What a tokenizer makes of a place depends on what lies around it: a word, the blanks behind it, a run of letters that is
merged. Nothing here knows its rules. A text is cut where two things were seen: encoded with the text on both sides, no
token reaches over the cut; and encoded from the cut on, the text behind it has the same tokens. Both were seen with
`margin` characters on each side. The piece before a cut is encoded with the margin behind it, of which the tokens are
then left out; and once more they must be the tokens with which the next piece begins, or the two are encoded as one.
So a change of tokens by a cut would need a tokenizer that looks further than the margin and sees nothing within it.
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
LONGEST = 1 << 23  # characters without a place to cut
_TRIES = 16  # places that are tried before the next ones are looked for further on
_AT_ONCE = min(os.cpu_count() or 1, 16)  # pieces that are encoded at a time, on as many threads


@dataclasses.dataclass(frozen=True)
class _Piece:
    text: str
    end: int  # tokens before this character count; the margin behind it is there to be looked at
    next: int  # where the next piece begins: at `end`, or behind a blank that the tokenizer puts before any text


def encode(tokenizer: Any, chunks: Iterable[str], piece: int = PIECE, margin: int = MARGIN) -> Iterator[list[int]]:
    """The token ids of the chunks' concatenation, in runs. Special tokens are found in the text, none are added."""
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
    """A place behind the middle of a text: where the left part ends and the right one begins."""
    encoding = tokenizer.encode(around, add_special_tokens=False)
    ids, offsets = encoding.ids, encoding.offsets
    behind = (j for j in range(1, len(ids)) if margin <= offsets[j][0] < margin + margin // 2)
    for j in itertools.islice((j for j in behind if offsets[j - 1][1] <= offsets[j][0]), _TRIES):
        # Blanks before it that no token covers belong to it. One that begins it may also be the tokenizer's own.
        start = offsets[j - 1][1]
        for following in (start, start + 1) if around[start] == " " else (start,):
            if tokenizer.encode(around[following:], add_special_tokens=False).ids == ids[j:]:
                return start, following
    return None


def _ids_before(piece: _Piece, encoding: Any, following: Any, margin: int) -> list[int] | None:
    """The tokens before the piece's end, where those behind it are the ones that the next piece begins with."""
    first = _token_behind(encoding, piece.end, len(piece.text))
    last = _token_behind(encoding, piece.next + margin // 2, len(piece.text))
    if first is None or last is None or encoding.token_to_chars(first)[0] < piece.end:
        return None
    if first > 0 and encoding.token_to_chars(first - 1)[1] > piece.end:
        return None
    same: bool = encoding.ids[first:last] == following.ids[: last - first]
    return encoding.ids[:first] if same and last > first else None


def _token_behind(encoding: Any, character: int, end: int) -> int | None:
    """The first token of the first character from this one on that has any."""
    found = (encoding.char_to_token(at) for at in range(character, end))
    return next((token for token in found if token is not None), None)


def _joined(left: _Piece, right: _Piece) -> _Piece:
    _check_length(left.next + right.end)
    return _Piece(left.text[: left.next] + right.text, left.next + right.end, left.next + right.next)


def _check_length(characters: int) -> None:
    if characters > LONGEST:
        raise InvalidArgumentError(
            f"no place to cut was found in {LONGEST} characters: the tokenizer makes other tokens of their parts than "
            "of the whole; give text with words or lines in it"
        )
