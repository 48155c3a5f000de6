"""Trained models as parents: which of their layers matter, and networks that start from them."""
