"""Studies: the same run with settings varied along axes, and the outcome of each run."""
