"""Text: corpora, tokenizers, token streams on disk, and batches of segments. Knows no torch."""
