"""The host's side of the paged cache: what a row is, and which pages belong to which sequence."""

import jax.numpy as jnp
import numpy as np

from .config import Config

# The entries past a sequence's last page. No page has this id, and jax_mla never reads it.
UNUSED_PAGE = 2**31 - 1


def row_layout(config: Config, kv_format: str | None, dtype: jnp.dtype) -> tuple[int, jnp.dtype]:
    """Return the elements of a token's row in the cache, and their dtype.

    Args:
      config: sizes.
      kv_format: "fp8_e4m3", "fp8_ds_mla", or None for `dtype`.
      dtype: dtype of the model.
    """
    if kv_format == "fp8_ds_mla":
        return 656, jnp.dtype(jnp.uint8)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return width, jnp.dtype(jnp.float8_e4m3fn) if kv_format == "fp8_e4m3" else dtype


class PageAllocator:
    """Gives pages to sequences as they grow, in a random order.

    Attributes:
      page_table: [batch, max_pages_per_seq] int32, page ids.
      page_size: tokens in a page.
    """

    def __init__(
        self, num_pages: int, page_size: int, batch: int, max_pages_per_seq: int, seed: int = 0
    ):
        """Start with all pages free.

        Args:
          num_pages: pages in the pool.
          page_size: tokens in a page.
          batch: sequences.
          max_pages_per_seq: columns of the page table.
          seed: seed of the order of pages. The order does not change any result.
        """
        self.page_size = page_size
        self.page_table = np.full((batch, max_pages_per_seq), UNUSED_PAGE, np.int32)
        self._num_held = np.zeros(batch, np.int32)
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()

    def grow(self, seq_lens: np.ndarray) -> bool:
        """Give each sequence the pages that it needs.

        Args:
          seq_lens: [batch] number of tokens that each sequence needs room for.

        Returns:
          Whether the page table changed.

        Raises:
          ValueError: a sequence has more pages than the page table has columns, or no page is free.
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
        """Free all pages of sequence `b`."""
        self._free += self.page_table[b, : self._num_held[b]].tolist()
        self.page_table[b] = UNUSED_PAGE
        self._num_held[b] = 0
