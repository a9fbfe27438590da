"""What training without a coordinator costs: rounds, views and joiners over libp2p, and rivals' rounds."""
