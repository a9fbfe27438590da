"""DiLoCo itself, pure: tensors in, tensors out. No process groups, clocks, threads, files or loggers."""
