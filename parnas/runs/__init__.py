"""The run folder: what it holds, and reading and writing it."""
