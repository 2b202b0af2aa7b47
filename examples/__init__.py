"""Examples of jax_mla. They are part of the repository and are not installed."""
