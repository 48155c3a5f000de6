"""Comparing runs: perplexities and costs, measured anew on the same text and machine."""
