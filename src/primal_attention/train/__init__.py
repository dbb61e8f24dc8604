"""Training: typed recipes, the loop, checkpoints, and one task file per benchmark."""
