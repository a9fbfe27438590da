"""Replicas as real processes, brought together by torchrun or at a rendezvous and connected over TCP."""
