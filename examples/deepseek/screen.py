"""Show texts while they are being generated."""

import shutil
import sys
from collections.abc import Callable

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


class Screen:
    """All texts at once on a terminal, one line each; elsewhere the first as it comes.

    Attributes:
      ids: tokens of each text so far.
    """

    def __init__(self, decode: Callable[[list[int]], str], labels: list[str], *, quiet: bool):
        """Show the labels.

        Args:
          decode: token ids to text.
          labels: what stands in front of each text.
          quiet: show nothing (all processes but the first).
        """
        self.ids: list[list[int]] = [[] for _ in labels]
        self._decode, self._labels, self._quiet = decode, labels, quiet
        self._is_terminal = sys.stdout.isatty()
        self._shown = ""
        self._print("\n" * len(labels) if self._is_terminal else labels[0])

    def show(self, tokens: list[int], is_live: list[bool]) -> None:
        """Add one token to each live text.

        Args:
          tokens: one of each text.
          is_live: whether the text still goes on.
        """
        for ids, token, live in zip(self.ids, tokens, is_live, strict=True):
            if live:
                ids.append(token)
        if self._is_terminal:
            self._print(f"\x1b[{len(self.ids)}A" + "".join(map(self._line, range(len(self.ids)))))
        else:  # only what is new; a tokenizer may change its mind about an unfinished character
            text = self._decode(self.ids[0])
            if text.startswith(self._shown) and not text.endswith("\ufffd"):
                self._print(text[len(self._shown) :])
                self._shown = text

    def finish(self) -> None:
        """Show the texts that were not shown as they came."""
        if not self._is_terminal:
            self._print("\n")
            for label, ids in zip(self._labels[1:], self.ids[1:], strict=True):
                self._print(f"{label}{self._decode(ids)}\n")

    def _line(self, row: int) -> str:
        width = shutil.get_terminal_size().columns - len(self._labels[row]) - 1
        text = self._decode(self.ids[row]).replace("\n", " ")
        return f"\r\x1b[K{self._labels[row]}{BOLD}{text[-width:]}{PLAIN}\n"

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", flush=True)
