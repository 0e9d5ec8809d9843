"""Loads the tokenizer of a Hugging Face folder with the library `tokenizers`, which only this module needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .errors import InvalidArgumentError, LibraryError, NotFoundError
from .model import Path

FILE = "tokenizer.json"


def load(path: Path) -> Any:
    """Loads the tokenizer of a folder with a tokenizer.json, or of that file, without truncation and padding."""
    try:
        import tokenizers
    except ImportError as error:
        raise LibraryError(
            f"a tokenizer needs the library tokenizers, which is not installed ({error}); pip install tokenizers, or "
            "sluice-train[tokenize]"
        ) from error
    name = os.fspath(path)
    file = os.path.join(name, FILE) if os.path.isdir(name) else name
    if not os.path.isfile(file):
        raise NotFoundError(
            f"'{file}' does not exist; name a folder with a {FILE}. Where a model has none, transformers makes it: "
            f"AutoTokenizer.from_pretrained(MODEL).save_pretrained('{name}')"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library has no exception type for this
        raise InvalidArgumentError(
            f"'{file}' is no tokenizer that tokenizers {tokenizers.__version__} reads: {error}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Decoder:
    """Converts tokens to text, one after another. A character of several tokens is shown with its last token."""

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        # A token's text can depend on the tokens before it: it is the text by which theirs becomes longer.
        self._context, self._shown = 0, len(self._ids)

    def add(self, token: int) -> str:
        """Takes a token; returns the text that can be shown now."""
        self._ids.append(token)
        text = self._rest()
        if text.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def end(self) -> str:
        """Returns the text of an incomplete last character."""
        return self._rest()

    def _rest(self) -> str:
        known = self._text(self._ids[self._context : self._shown])
        return self._text(self._ids[self._context :])[len(known) :]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
