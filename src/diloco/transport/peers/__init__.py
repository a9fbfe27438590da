"""Replicas in processes of their own: the shell that does the I/O of `diloco.protocol` over any kind of connection."""
