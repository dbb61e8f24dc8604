"""Context parallelism: one sequence over several ranks, for models with Primal-Attention."""

from .apply import average_gradients, context_parallel, shard, unshard
from .context import Context

__all__ = ["Context", "average_gradients", "context_parallel", "shard", "unshard"]
