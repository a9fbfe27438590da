"""The training loop: settings, the inner step, replicas, sessions and whole runs."""
