"""The CPU backend: blocks of tokens that stay in the cache, and a hand-written backward pass."""
