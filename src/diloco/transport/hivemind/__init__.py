"""Replicas anywhere, with nobody in charge: found in a Hivemind DHT, connected over libp2p's encrypted streams."""
