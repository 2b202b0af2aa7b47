"""The op `append`: see `api.py`."""
