"""What both sides call: matmuls on the grid, attention, norms and log-probabilities whose rows do not depend on the batch."""
