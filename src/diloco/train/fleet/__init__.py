"""The replicas of this process, and their way to the others."""
