"""`python -m sluice generate --tokenizer FOLDER`: generates text with a model whose tokens are not bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from . import _tokenizer
from ._library import find_program
from ._tokenize import Parser
from .errors import InvalidArgumentError

FLAG = "--tokenizer"


def main(words: Sequence[str]) -> int:
    """Runs `sluice generate` with the prompt's tokens, shows the text of its tokens, and returns its exit status."""
    advice = "a text that begins with - is given with =, as in --prompt=-x"
    parser = Parser(advice, add_help=False, allow_abbrev=False)
    for flag in (FLAG, "--prompt", "--prompt-tokens", "--output"):
        parser.add_argument(flag, action="append", default=[])
    given, others = parser.parse_known_args(words)
    if len(given.tokenizer) != 1 or len(given.prompt) != 1 or given.prompt_tokens or given.output:
        raise InvalidArgumentError(
            f"with {FLAG}, which is given once, generate takes one --prompt with text and prints text; without it "
            "--prompt-tokens and --output tokens are for token ids"
        )
    prompt, tokenizer = given.prompt[0], _tokenizer.load(given.tokenizer[0])
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise InvalidArgumentError(
            f"--prompt is {prompt!r}, of which the tokenizer makes no token; give a text, or a token of it that begins one, "
            "such as '<|endoftext|>'"
        )
    command = [
        str(find_program()),
        "generate",
        "--output=tokens",
        f"--prompt-tokens={','.join(map(str, ids))}",
        *others,
    ]
    decoder = _tokenizer.Decoder(tokenizer, ids)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shown = prompt
        try:
            for line in process.stdout:
                print(shown, end="", flush=True)
                shown = decoder.add(int(line))
        except BaseException:  # Ctrl-C, or the reader of the output has closed it
            process.terminate()
            raise
        if (status := process.wait()) == 0:
            print(shown + decoder.end())
        return status
