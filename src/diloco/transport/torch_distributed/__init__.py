"""Replicas as real processes: payloads over `torch.distributed` (gloo), control messages beside them."""
