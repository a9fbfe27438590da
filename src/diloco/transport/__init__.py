"""The only I/O between replicas: one contribution in, one average out, the same on every replica."""
