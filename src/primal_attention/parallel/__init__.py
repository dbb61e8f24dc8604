"""One sequence over many machines: context parallelism for models with Primal-Attention, on PyTorch's own engine."""

from .apply import average_gradients, context_parallel, shard, unshard
from .context import Context

__all__ = ["Context", "average_gradients", "context_parallel", "shard", "unshard"]
