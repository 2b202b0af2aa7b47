"""The op `index_append`: see `api.py`."""
