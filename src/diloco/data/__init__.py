"""Text into tokens into deterministic, disjoint, resumable shards."""
