"""vLLM as sampler: the adapter, what runs inside the engine's worker, and how the two share bytes."""
