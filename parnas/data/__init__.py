"""Text: corpora, tokenizers, token streams on disk, and batches of segments. Independent of torch."""
