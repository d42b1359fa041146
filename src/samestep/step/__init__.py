"""Lanes and their tree, the gradient of a global batch, its exchange, and sharded optimizers."""
