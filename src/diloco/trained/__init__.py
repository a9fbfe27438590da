"""What is done with a model that was trained: load, evaluate, sample, export. Training uses the first three, too."""
