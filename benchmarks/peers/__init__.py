"""Other implementations, timed beside ours where they are installed."""
