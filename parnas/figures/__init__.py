"""Figures of runs, drawn from the files of run folders; no module here imports torch."""
