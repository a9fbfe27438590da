"""From text on this machine to a model that transformers loads: every stage of a run, with an interruption."""
