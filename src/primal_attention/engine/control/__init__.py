"""Offline reinforcement learning: Decision Transformers on trajectories, and the episodes that measure them."""
