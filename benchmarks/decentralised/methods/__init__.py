"""One module per thing to measure; each has a class ``Program``. A rival is imported only where it runs."""
