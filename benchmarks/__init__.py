"""Measurements that take longer than tests. Each folder holds a command and the results that it printed."""
