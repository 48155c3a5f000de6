"""Figures of runs, drawn from the files of their folders; needs no torch, and loads matplotlib only to draw."""
