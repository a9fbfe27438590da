"""Checkpoints: what they hold, how they are saved and how they are read."""
