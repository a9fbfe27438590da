"""`DiLoCo` for any training loop, the rounds of its fragments, and the recovery of state from other replicas."""
