"""The DiLoCo algorithm as pure functions of tensors, without process groups, clocks, threads, files or loggers."""
