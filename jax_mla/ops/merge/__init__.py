"""The op `merge`: see `api.py`."""
