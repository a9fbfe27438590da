"""Throughput of the codecs: ``python -m benchmarks.codecs``."""
