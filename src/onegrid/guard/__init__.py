"""Is it still one policy: checks at every synchronization and step, verdicts, and the faults that try them."""
