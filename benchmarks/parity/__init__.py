"""Held-out losses of DiLoCo and of data-parallel training, at equal tokens and from the same shared start."""
