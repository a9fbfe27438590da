"""Studies: the same run with settings varied along axes, and what came of each."""
