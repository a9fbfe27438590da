"""How long `diloco watch` takes to show a large run, and what it needs."""
