"""Does it learn as well? Held-out losses at equal tokens, after a shared start."""
