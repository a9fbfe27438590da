"""The native decoder and its presets."""
