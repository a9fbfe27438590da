"""The heart: `DiLoCo` around a training loop, the rounds of its fragments, and taking over the state of others."""
