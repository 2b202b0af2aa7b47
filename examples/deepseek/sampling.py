"""Choose the next token: the likeliest one, or a random one by temperature and top-p."""

import jax
import jax.numpy as jnp


def sample(
    logits: jax.Array, key: jax.Array, *, temperature: float = 0.0, top_p: float = 1.0
) -> jax.Array:
    """Draw one token for each sequence.

    Args:
      logits: [batch, vocab] float32.
      key: random key.
      temperature: divides the logits. 0 takes the likeliest token, and so does what is 0 on the
        device.
      top_p: draw only from the likeliest tokens, as many as it takes to reach this probability.

    Returns:
      [batch] int32.

    Raises:
      ValueError: `temperature` is negative, or `top_p` is not in (0, 1].
    """
    if temperature < 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected above 0 and at most 1, got {top_p}")
    if temperature < jnp.finfo(jnp.float32).tiny:
        return logits.argmax(-1).astype(jnp.int32)
    # Without the maximum, a small temperature could make several logits infinite.
    logits = (logits - logits.max(-1, keepdims=True)) / temperature
    if top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The maximum keeps the likeliest token even if `top_p` rounds to 0 in float32.
        num_kept = jnp.maximum((before < top_p).sum(-1, keepdims=True), 1)
        threshold = jnp.take_along_axis(descending, num_kept - 1, axis=-1)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)
