"""The prompts of `tsmla generate`: token ids or lines of text, and the tokenizer of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tsmla_kernels.cli.parsing import read_text


def read_prompt_ids(path: Path) -> list[list[int]]:
    """Prompts from a JSON list of lists of token ids.

    Raises:
      ValueError: the file can't be read, or is no such list, or an empty one; the message names the file and the first
        entry at fault.
    """
    text = read_text("--prompt-ids", path)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"--prompt-ids {path}: not readable as JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"--prompt-ids {path}: not readable as JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"--prompt-ids {path}: holds a JSON {type(value).__name__}; legal: a list of lists of token ids, not empty"
        )
    for index, prompt in enumerate(value):
        if not isinstance(prompt, list):
            raise ValueError(f"--prompt-ids {path}: prompt {index} = {prompt!r:.60}; legal: a list of token ids")
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(f"--prompt-ids {path}: prompt {index} holds {token!r:.60}; legal: integers")
    return value


def read_lines(path: Path) -> list[str]:
    """Prompts from a file of text, one a line, without blank lines; ValueError if it can't be read or holds none."""
    # Not splitlines, which cuts at form feeds and at separators of Unicode, too.
    lines = [line.removesuffix("\r") for line in read_text("--prompt-file", path).split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"--prompt-file {path}: holds no prompt; legal: one a line")
    return lines


class Tokenizer:
    """A checkpoint's `tokenizer.json`, with the beginning-of-text token that `tokenizer_config.json` may ask for."""

    def __init__(self, tokenizer: Any, bos: int | None) -> None:
        self._tokenizer = tokenizer
        # A file that was made for batches may truncate and pad texts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Tokens that a template puts before a text are prepended here. Tokens that it puts after a text are left out:
        # they would end the prompt.
        whole = tokenizer.encode("a")
        count = next((index for index, text in enumerate(whole.sequence_ids) if text is not None), len(whole.ids))
        self._before = list(whole.ids[:count])
        if bos is not None and self._before[:1] != [bos]:
            self._before.insert(0, bos)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. The special tokens that the model expects come first, unless the text begins with the
        first of them.
        """
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return ids if ids[:1] == self._before[:1] else [*self._before, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The checkpoint's tokenizer. Raises a ValueError or an ImportError if it can't be read."""
    from tsmla_jax.nn.checkpoints.hf_config import read_optional_config

    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        what = "not a regular file" if path.exists() else "there is no such file"
        raise ValueError(f"{path}: {what}; --prompt and --prompt-file need it, --prompt-ids does not")
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise ImportError(
            "--prompt and --prompt-file need the package tokenizers: pip install 'tsmla-jax[hf]'; --prompt-ids does not"
        ) from None
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:
        # The package raises plain Exception for a file that it can't read.
        raise ValueError(f"{path}: not a tokenizer: {error}") from None
    bos = None
    config_path = checkpoint / "tokenizer_config.json"
    config, _ = read_optional_config(config_path)
    token = config.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{config_path}: bos_token = {token!r:.60}; legal: a token's text, or null")
    if config.get("add_bos_token") and token is not None:
        bos = backend.token_to_id(token)
    return Tokenizer(backend, bos)
