"""Language models: the native decoder and its presets, models of ``transformers``, and user-defined modules."""
