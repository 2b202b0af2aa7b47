"""The op `decode`: see `api.py`."""
