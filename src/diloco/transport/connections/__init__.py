"""Connections between processes: one for control messages and several for payloads. Nothing here knows of rounds."""
