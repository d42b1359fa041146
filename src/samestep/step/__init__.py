"""One step: lanes and their tree, gradients and their exchange, sharded optimizers."""
