"""What does it cost that nobody is in charge? Rounds, views and joiners over libp2p, and rivals' rounds."""
