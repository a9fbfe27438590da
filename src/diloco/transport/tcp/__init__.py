"""Replicas in processes of their own, which find each other through torchrun or a rendezvous and connect over TCP."""
