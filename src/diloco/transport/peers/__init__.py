"""Processes that exchange contributions, whatever carries their bytes: control messages, rounds, votes, views."""
