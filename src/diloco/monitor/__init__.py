"""Sinks that consume the events of a run: consoles, ``metrics.jsonl``, TensorBoard and Weights & Biases."""
