"""The state machine of one rank: events and a time go in, actions come out. It does no I/O and owns no clock."""
