"""The package on one GPU: use of its peak, cost of rounds, replicas that share it, and checks."""
