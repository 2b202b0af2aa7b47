"""Attention of each query to a list of cached tokens of its own."""
