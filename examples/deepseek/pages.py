"""The host's side of the paged cache: what a row is, and which pages are free."""

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

    Raises:
      ValueError: the latent has other sizes than "fp8_ds_mla" holds.
    """
    if kv_format == "fp8_ds_mla":
        ckv, kpe = config.kv_lora_rank, config.qk_rope_head_dim
        if (ckv, kpe) != (512, 64):
            raise ValueError(
                "--kv-format: expected a latent of 512 + 64 values for fp8_ds_mla, got "
                f"{ckv} + {kpe}"
            )
        return 656, jnp.dtype(jnp.uint8)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return width, jnp.dtype(jnp.float8_e4m3fn) if kv_format == "fp8_e4m3" else dtype


class PagePool:
    """The free pages of a pool, in a random order.

    Attributes:
      page_size: tokens in a page.
      num_pages: pages in the pool, free or not.
    """

    def __init__(self, num_pages: int, page_size: int, seed: int = 0):
        """Start with all pages free.

        Args:
          num_pages: pages in the pool.
          page_size: tokens in a page.
          seed: seed of the order of pages. The order does not change any result.
        """
        self.num_pages, self.page_size = num_pages, page_size
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()

    @property
    def num_free(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def take(self, num_tokens: int) -> list[int] | None:
        """Take the pages of a sequence.

        Args:
          num_tokens: the most tokens that the sequence will have.

        Returns:
          Page ids, or None if too few pages are free.
        """
        needed = -(-num_tokens // self.page_size)
        if needed > len(self._free):
            return None
        split = len(self._free) - needed
        self._free, taken = self._free[:split], self._free[split:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Free the pages of a sequence that has ended."""
        self._free += pages
