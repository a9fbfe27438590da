"""Watching a run. Sees events only."""
