"""What the outer step does in short runs: a whole round late, other averages, momentum that restarts."""
