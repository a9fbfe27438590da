"""What does keeping replicas in step cost over a WAN? Ours and the rivals', on emulated links."""
