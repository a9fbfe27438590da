"""Simulations of up to 1000 replicas: ``python -m benchmarks.scale``."""
