"""Fleets: the replicas of this process and their connection to the others."""
