"""One module per way to keep replicas in step; each has a class ``Program``. A rival is imported only where it runs."""
