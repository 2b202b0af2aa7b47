"""The function `prefill`: unabsorbed attention for prompts, composed of JAX's ops."""
