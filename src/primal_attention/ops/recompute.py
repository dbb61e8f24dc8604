"""Memory for time: a pass that keeps x alone and is made a second time on the way back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .layer import Attended
from .primal import attend


def recomputed(x: Tensor, *args: Any, dropout: float = 0.0, **keywords: Any) -> Attended:
    """As `attend`; of what has the size of x autograd keeps x alone."""

    def layer(x: Tensor) -> Attended:
        return attend(x, *args, dropout=dropout, **keywords)

    # A second pass drops what the first one dropped. Without dropout the generator is left alone: a CUDA graph's
    # capture forbids a look at it.
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=dropout > 0)  # type: ignore[no-any-return]
