"""The layer on a CPU: blocks of tokens that stay in the cache, and a hand-written backward pass that saves little."""

from .attention import cpu_attention

__all__ = ["cpu_attention"]
