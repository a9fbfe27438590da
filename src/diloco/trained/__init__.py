"""Load, evaluate, sample and export trained models. Training itself uses the first three."""
