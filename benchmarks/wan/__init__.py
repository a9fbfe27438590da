"""What synchronisation costs over a WAN: this package and other projects on emulated links."""
