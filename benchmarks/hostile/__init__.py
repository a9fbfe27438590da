"""What liars and strangers can do to a run: a hundred attacks, and what becomes of the honest."""
