"""The function `mixed_attention`: a step of prompts and of sequences that decode."""
