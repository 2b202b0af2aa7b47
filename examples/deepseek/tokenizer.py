"""Turn text into token ids and back, with the tokenizer in the checkpoint directory."""

import importlib.util
import json
from pathlib import Path
from typing import Protocol

from .recall import Vocabulary


class Tokenizer(Protocol):
    """The methods that generate.py calls."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the token that begins a text, if there is one."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        ...


class HuggingFaceTokenizer:
    """A `tokenizer.json`. The package `tokenizers` reads it."""

    def __init__(self, path: Path):
        """Load the file.

        Args:
          path: the file.

        Raises:
          ValueError: `tokenizers` is not installed, or it cannot read the file.
        """
        if importlib.util.find_spec("tokenizers") is None:
            raise ValueError(f"{path}: the package tokenizers reads it; run pip install tokenizers")
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more specific
            raise ValueError(f"{path}: expected a tokenizer in JSON ({error})") from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, special tokens included."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(ids)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read `vocabulary.json` (the recall checkpoint) or `tokenizer.json`.

    Args:
      directory: a checkpoint directory.

    Returns:
      The tokenizer.

    Raises:
      ValueError: there is neither file, or it cannot be read.
    """
    directory = Path(directory)
    path = directory / "vocabulary.json"
    if path.exists():
        try:
            return Vocabulary(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: expected a JSON list of tokens ({error})") from error
    if (directory / "tokenizer.json").exists():
        return HuggingFaceTokenizer(directory / "tokenizer.json")
    raise ValueError(f"{directory}: expected vocabulary.json or tokenizer.json, found neither")
