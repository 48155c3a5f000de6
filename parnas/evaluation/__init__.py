"""Evaluation of trained networks: comparison tables, evaluation protocols and analyses."""
