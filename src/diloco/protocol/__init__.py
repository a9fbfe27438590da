"""The state machine of one rank: events and a time in, actions out. It does no I/O and owns no clock."""
