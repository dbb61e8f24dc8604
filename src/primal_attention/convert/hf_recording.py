"""transformers' encoders while a CUDA graph is recorded: no mask where no token is hidden.

Run as usual, an encoder that is given no mask attends without one, and torch takes its fastest kernel. transformers
5.17 takes a recording for a trace and writes the mask out to be safe (later releases only where one is given). With a
mask torch takes a kernel that is several times slower, and every replay pays for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def without_idle_masks() -> Iterator[None]:
    """Meanwhile transformers decides about encoders' masks as outside a recording. A given mask stays as it is."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionMaskInterface as Masks

    usual = Masks()["sdpa"]

    def mask(*args: Any, **given: Any) -> Tensor | None:
        idle = given.get("attention_mask") is None and given.get("local_size") is None
        if not args and idle and given.get("allow_is_bidirectional_skip"):
            return None
        found: Tensor | None = usual(*args, **given)
        return found

    Masks.register("sdpa", mask)
    try:
        yield
    finally:
        Masks.register("sdpa", usual)
