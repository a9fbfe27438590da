"""Measurements that take longer than tests. Each folder holds its command, and the results that it printed."""
