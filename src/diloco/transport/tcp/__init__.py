"""Replicas in processes of their own, which find each other through a rendezvous and connect over TCP."""
