"""Up to 1000 replicas, simulated: ``python -m benchmarks.scale``."""
