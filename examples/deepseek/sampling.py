"""Choose the next token: greedy, by temperature, or from the nucleus (top-p)."""

import jax
import jax.numpy as jnp


def sample(
    logits: jax.Array, key: jax.Array, *, temperature: float = 0.0, top_p: float = 1.0
) -> jax.Array:
    """Draw one token for each sequence.

    Args:
      logits: [batch, vocab] float32.
      key: random key.
      temperature: 0 for greedy, otherwise the divisor of the logits.
      top_p: keep the fewest most likely tokens whose probabilities reach this sum.

    Returns:
      [batch] int32.
    """
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The most likely token is always kept: nothing comes before it.
        num_kept = jnp.maximum((before < top_p).sum(-1, keepdims=True), 1)
        threshold = jnp.take_along_axis(descending, num_kept - 1, axis=-1)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)
