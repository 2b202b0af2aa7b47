"""Show texts while they are generated."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
PROMPT_CHARACTERS = 32  # how much of a prompt's end stands beside its text


class Screen:
    """Shows each text beside the end of its prompt.

    On a terminal, every text has one line, and all lines grow together. In a pipe or file, the
    first text is written as it grows; the others follow when it is complete.

    Attributes:
      ids: the tokens of each text so far.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompts: Sequence[list[int]],
        *,
        quiet: bool = False,
    ):
        """Show the prompts.

        Args:
          decode: turns token ids into text.
          prompts: token ids of each prompt.
          quiet: show nothing. All processes but the first are quiet.
        """
        self.ids: list[list[int]] = [[] for _ in prompts]
        self._decode, self._quiet = decode, quiet
        self._labels = [self._label(prompt) for prompt in prompts]
        self._is_terminal = sys.stdout.isatty()
        self._shown = ""
        self._print("\n" * len(prompts) if self._is_terminal else self._labels[0])

    def show(self, tokens: Mapping[int, int]) -> None:
        """Add a token to some of the texts.

        Args:
          tokens: by the number of the text.
        """
        for text, token in tokens.items():
            self.ids[text].append(token)
        if self._is_terminal:
            self._print(f"\x1b[{len(self.ids)}A" + "".join(map(self._line, range(len(self.ids)))))
            return
        text = self._decode(self.ids[0])
        # The last tokens may hold only a part of a character. Wait until it is complete.
        if text.startswith(self._shown) and not text.endswith("\ufffd"):
            self._print(text[len(self._shown) :])
            self._shown = text

    def finish(self) -> None:
        """Show what was not shown yet: the rest of the first text, and the other texts."""
        if not self._is_terminal:
            text = self._decode(self.ids[0])
            if not text.startswith(self._shown):  # later tokens changed what was shown
                self._print(f"\n{self._labels[0]}")
                self._shown = ""
            self._print(f"{text[len(self._shown) :]}\n")
            for label, ids in zip(self._labels[1:], self.ids[1:], strict=True):
                self._print(f"{label}{self._decode(ids)}\n")

    def _label(self, prompt: list[int]) -> str:
        text = self._decode(prompt).replace("\n", " ")
        if len(text) > PROMPT_CHARACTERS:
            text = "..." + text[-PROMPT_CHARACTERS:]
        return f"{len(prompt):5d} tokens | {text} -> "

    def _line(self, row: int) -> str:
        width = shutil.get_terminal_size().columns - len(self._labels[row]) - 1
        text = self._decode(self.ids[row]).replace("\n", " ")
        return f"\r\x1b[K{self._labels[row]}{BOLD}{text[-max(width, 1) :]}{PLAIN}\n"

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", flush=True)
