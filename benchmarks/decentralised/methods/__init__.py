"""One module per method, each with a class ``Program``. A rival is imported only where it runs."""
