"""Several processes, checkpoints in pieces, and orders to stop."""
