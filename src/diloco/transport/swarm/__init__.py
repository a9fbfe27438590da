"""Replicas without a coordinator, which find each other in a Hivemind DHT and connect over libp2p."""
