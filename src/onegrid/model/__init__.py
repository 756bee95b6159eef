"""One decoder for learner and sampler: its shape, its weights, its forward pass."""
