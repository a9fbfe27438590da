"""All stages of a run, from the text on this machine to a model that transformers loads, with an interruption."""
