"""Programs of one replica around the Trainers, loops and optimizers of others; `benchmarks.real.loops` starts them."""
