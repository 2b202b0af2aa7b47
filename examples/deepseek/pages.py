"""Host side of the paged cache: which page holds which tokens of which sequence."""

import numpy as np

# Entries past a sequence's end are never read; an id that owns no page shows it.
UNUSED_PAGE = 2**31 - 1


class PageAllocator:
    """Hands out fixed-size pages, in shuffled order, as sequences grow.

    Attributes:
      page_table: [batch, max_pages_per_seq] int32, global page ids.
      page_size: tokens in a page.
    """

    def __init__(
        self, num_pages: int, page_size: int, batch: int, max_pages_per_seq: int, seed: int = 0
    ):
        """Make all pages free.

        Args:
          num_pages: pages in the pool.
          page_size: tokens in a page.
          batch: sequences.
          max_pages_per_seq: columns of the page table.
          seed: of the order in which pages are handed out; the order never changes a result.
        """
        self.page_size = page_size
        self.page_table = np.full((batch, max_pages_per_seq), UNUSED_PAGE, np.int32)
        self._num_held = np.zeros(batch, np.int32)
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()

    def grow(self, seq_lens: np.ndarray) -> bool:
        """Make room for `seq_lens[b]` tokens of each sequence b.

        Args:
          seq_lens: [batch] tokens that the cache must be able to hold.

        Returns:
          Whether the page table changed.

        Raises:
          ValueError: a sequence outgrows the page table, or no page is free.
        """
        needed = -(-np.asarray(seq_lens) // self.page_size)
        if needed.max(initial=0) > self.page_table.shape[1]:
            limit = self.page_table.shape[1] * self.page_size
            raise ValueError(f"seq_lens: expected at most {limit} tokens, got {max(seq_lens)}")
        changed = False
        for b in range(len(needed)):
            while self._num_held[b] < needed[b]:
                if not self._free:
                    raise ValueError("no page is free: make the pool larger or the batch smaller")
                self.page_table[b, self._num_held[b]] = self._free.pop()
                self._num_held[b] += 1
                changed = True
        return changed

    def release(self, b: int) -> None:
        """Give back all pages of sequence `b`."""
        self._free += self.page_table[b, : self._num_held[b]].tolist()
        self.page_table[b] = UNUSED_PAGE
        self._num_held[b] = 0
