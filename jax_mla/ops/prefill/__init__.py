"""The function `prefill`: unabsorbed attention for prompts."""
