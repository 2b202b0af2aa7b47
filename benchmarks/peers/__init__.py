"""Other implementations, which are timed beside ours if they are installed."""
