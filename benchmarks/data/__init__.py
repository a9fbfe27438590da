"""Speed of the data path: ``python -m benchmarks.data``."""
