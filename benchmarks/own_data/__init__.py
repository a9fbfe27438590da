"""What different data at each replica do to learning."""
