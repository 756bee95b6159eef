"""The side with gradients: grid linears, loss, optimizer."""
