"""Text sources, tokenizers, and deterministic, disjoint and resumable batches for each replica."""
