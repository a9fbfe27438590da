"""The time that `diloco watch` takes to show a large run, and the memory that it needs."""
