"""One folder per op: `api.py` (public), `primitive.py` (JAX) and `reference.py` (definition)."""
