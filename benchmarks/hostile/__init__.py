"""Attacks by malicious members, non-members and files, and their effect on honest processes."""
