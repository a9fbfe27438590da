"""Who takes part: views, as values. Time is an argument here, never read."""
