"""The layer on a CPU: the equations as few passes, in blocks that stay in the cache, little kept for the way back."""

from .attention import lean_attention

__all__ = ["lean_attention"]
