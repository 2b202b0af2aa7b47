"""Continuous batching: which tokens of which sequences a step has. Everything here is on the host.

A step has `slots` sequences at most. A request waits until a slot is free, and pages for all of its
tokens, the new ones included; so it never has to give way to another. Its prompt is fed in chunks:
as many tokens as a step has room for, beside one token of each sequence that decodes. When it ends,
its slot and its pages go to the next request.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .pages import UNUSED_PAGE, PagePool

OWN = -1  # as a token to feed: the one that the model has just sampled for this sequence


@dataclasses.dataclass(eq=False)
class Request:
    """A text to continue, and how far it is.

    Attributes:
      prompt: token ids.
      max_new_tokens: tokens to generate, unless the text ends before.
      script: tokens to use in the place of the first generated ones; `OWN` keeps the model's.
      ids: the generated tokens so far, with those of the script.
      fed: tokens that steps have had. The newest `ids` may still be on the way.
      has_ended: whether the text is complete.
      slot: its row in the page table, while it runs.
      pages: its pages, while it runs.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    script: Sequence[int] = ()
    ids: list[int] = dataclasses.field(default_factory=list)
    fed: int = 0
    has_ended: bool = False
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that its cache holds at the end: all but the last one."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def left(self) -> int:
        """Tokens that the next step could have: the rest of the prompt, or one, or none."""
        return max(len(self.prompt) - self.fed, int(self.fed < self.num_tokens))

    def scripted(self, n: int) -> int:
        """Return the script's token in the place of the `n`th generated one, or `OWN`."""
        return self.script[n] if n < len(self.script) else OWN

    def feed(self, count: int) -> Sequence[int]:
        """Return the next `count` tokens, and count them as fed."""
        begin, self.fed = self.fed, self.fed + count
        if begin < len(self.prompt):
            return self.prompt[begin : begin + count]
        return [self.scripted(begin - len(self.prompt))]


class Step(NamedTuple):
    """What a step feeds, as host arrays of static sizes.

    With several groups (`Placement.num_groups`), each has an equal part of every array. Its part of
    `cu_q_lens` counts from 0.

    Attributes:
      tokens: [tokens] int32, `OWN` for the slot's newest token.
      positions: [tokens] int32, -1 for padding.
      rows: [tokens] int32, the slot of each token. None if token n is of slot n.
      ends: [slots] int32, the last token of each slot; its logits give the next one. -1 for a slot
        without tokens. None like `rows`.
      cu_q_lens: [groups * (slots / groups + 1)] int32. None like `rows`.
      requests: those whose next token this step samples.
    """

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray | None
    ends: np.ndarray | None
    cu_q_lens: np.ndarray | None
    requests: list[Request]


class Scheduler:
    """Decides what each step feeds.

    Attributes:
      page_table: [slots, max_pages_per_seq] int32. A row stays as it is while its request runs.
      table_changes: how often the page table has changed.
      pools: the free pages of each group.
      waiting: requests without a slot.
      running: the requests that have one, by slot.
    """

    def __init__(self, pools: list[PagePool], slots: int, max_pages_per_seq: int, sizes: list[int]):
        """Start with no request.

        Args:
          pools: the free pages of each group.
          slots: the most sequences at a time, a multiple of the number of groups.
          max_pages_per_seq: columns of the page table.
          sizes: the numbers of tokens that a step with prompts may have, ascending, each a multiple
            of the number of groups and larger than `slots`.
        """
        self.pools, self._slots, self._sizes = pools, slots // len(pools), sizes
        self.page_table = np.full((slots, max_pages_per_seq), UNUSED_PAGE, np.int32)
        self.table_changes = 0
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Let a request wait for a slot.

        Args:
          request: new.

        Raises:
          ValueError: it has no prompt or no new tokens, or no pool could ever hold it.
        """
        if not request.prompt:
            raise ValueError("prompt: expected at least one token, got none")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {request.max_new_tokens}")
        page_size = self.pools[0].page_size
        columns = min(self.pools[0].num_pages, self.page_table.shape[1])
        if request.num_tokens > columns * page_size:
            raise ValueError(
                f"the cache is too small for one request: expected at most {columns * page_size} "
                f"tokens, got {len(request.prompt)} of the prompt and {request.max_new_tokens} new "
                "ones"
            )
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Give back the slot and the pages of a request that has ended."""
        request.has_ended = True
        self.pools[request.slot // self._slots].give_back(request.pages)
        del self.running[request.slot]
        self.page_table[request.slot] = UNUSED_PAGE
        self.table_changes += 1

    def next_step(self) -> Step | None:
        """Admit what has room, and return what the next step feeds; None if there is nothing."""
        self._admit()
        live = [request for request in self.running.values() if request.left]
        if not live:
            return None
        if any(request.fed < len(request.prompt) for request in live):
            return self._mixed_step(live)
        slots = self.page_table.shape[0]
        tokens, positions = np.zeros(slots, np.int32), np.full(slots, -1, np.int32)
        for request in live:
            positions[request.slot] = request.fed
            (tokens[request.slot],) = request.feed(1)
        return Step(tokens, positions, None, None, None, live)

    def empty_step(self, size: int) -> Step:
        """Return a step without sequences: of `size` tokens, or of one a slot if that is 0."""
        slots, zeros = self.page_table.shape[0], np.zeros(size, np.int32)
        if size == 0:
            zeros = np.zeros(slots, np.int32)
            return Step(zeros, zeros - 1, None, None, None, [])
        bounds = np.zeros(slots + len(self.pools), np.int32)
        return Step(zeros, zeros - 1, zeros, np.full(slots, -1, np.int32), bounds, [])

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            free = [slot for slot in range(len(self.page_table)) if slot not in self.running]
            # The group with the most free slots first: groups are computed side by side.
            groups = collections.Counter(slot // self._slots for slot in free).most_common()
            for group, _ in groups:
                pages = self.pools[group].take(request.num_tokens)
                if pages is not None:
                    break
            else:
                return  # those behind it wait as well, so that none waits for ever
            self.waiting.popleft()
            request.slot = next(slot for slot in free if slot // self._slots == group)
            request.pages = pages
            self.running[request.slot] = request
            self.page_table[request.slot, : len(pages)] = pages
            self.table_changes += 1

    def _mixed_step(self, live: list[Request]) -> Step:
        """Return one token of each sequence that decodes, and as much of the prompts as fits."""
        groups = [[r for r in live if r.slot // self._slots == g] for g in range(len(self.pools))]
        wanted = max(sum(request.left for request in group) for group in groups) * len(groups)
        size = next((size for size in self._sizes if size >= wanted), self._sizes[-1])
        tokens, rows = np.zeros((2, size), np.int32)
        positions = np.full(size, -1, np.int32)
        ends = np.full(len(self.page_table), -1, np.int32)
        cu_q_lens = np.zeros((len(groups), self._slots + 1), np.int32)
        step = Step(tokens, positions, rows, ends, cu_q_lens.reshape(-1), [])
        for g, group in enumerate(groups):
            counts = self._share(group, size // len(groups))
            at = g * size // len(groups)
            for slot in range(self._slots):
                request = self.running.get(g * self._slots + slot)
                if count := counts.get(g * self._slots + slot, 0):
                    assert request is not None
                    span = slice(at, at + count)
                    positions[span] = np.arange(request.fed, request.fed + count)
                    tokens[span], rows[span] = request.feed(count), request.slot
                    at += count
                    ends[request.slot] = at - 1
                    if request.fed >= len(request.prompt):
                        step.requests.append(request)
                cu_q_lens[g, slot + 1] = at - g * size // len(groups)
        return step

    @staticmethod
    def _share(group: list[Request], room: int) -> dict[int, int]:
        """Return the tokens of each slot: those that decode first, then prompts in order."""
        counts = {}
        for request in sorted(group, key=lambda request: request.fed < len(request.prompt)):
            counts[request.slot] = min(request.left, room)
            room -= counts[request.slot]
        return counts
