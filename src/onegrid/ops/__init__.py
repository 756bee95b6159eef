"""What both sides call: matmuls on the grid, attention, norms, log-probabilities. No row depends on its batch."""
