"""Fault injection: real peers are killed, frozen, cut off and restarted at random while they train."""
