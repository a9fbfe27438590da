"""Does the decentralised mode survive? Real peers that are killed, frozen, cut off and started again at random."""
