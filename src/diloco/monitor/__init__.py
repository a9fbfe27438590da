"""Sinks that consume the events of a run: consoles, ``metrics.jsonl``, TensorBoard and Weights & Biases."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
