"""Text to token ids and back, by whatever the checkpoint directory brings."""

import importlib.util
import json
from pathlib import Path
from typing import Protocol

from .recall import Vocabulary


class Tokenizer(Protocol):
    """What generate.py needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the token that begins a text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""
        ...


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package."""

    def __init__(self, path: Path):
        """Load it.

        Args:
          path: the file.

        Raises:
          ValueError: `tokenizers` is not installed.
        """
        if importlib.util.find_spec("tokenizers") is None:
            raise ValueError(f"{path}: expected the package tokenizers: pip install tokenizers")
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens added."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""
        return self._tokenizer.decode(ids)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read `vocabulary.json` (the recall checkpoint) or `tokenizer.json`.

    Args:
      directory: a checkpoint directory.

    Returns:
      The tokenizer.

    Raises:
      ValueError: there is neither, or the package to read it is missing.
    """
    directory = Path(directory)
    if (directory / "vocabulary.json").exists():
        return Vocabulary(json.loads((directory / "vocabulary.json").read_text()))
    if (directory / "tokenizer.json").exists():
        return HuggingFaceTokenizer(directory / "tokenizer.json")
    raise ValueError(f"{directory}: expected vocabulary.json or tokenizer.json, found neither")
