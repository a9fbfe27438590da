"""The training loop: replicas, evaluation, checkpoints, generation."""
