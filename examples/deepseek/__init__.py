"""A DeepSeek-architecture model on jax_mla. Start with model.py; README.md explains the rest."""
