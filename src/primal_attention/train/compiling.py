"""Trainings through torch.compile: which ones, and what stays eager beside them.

A model says by its own `compile` which of its parts are compiled, usually block by block, since blocks are alike. The
parts are replaced by nothing: parameters keep their names, so checkpoints know nothing of it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from primal_attention.train.config import TrainerConfig


def suits(config: TrainerConfig) -> bool:
    """Whether a training's model is compiled."""
    if config.compile != "auto":
        return config.compile == "on"
    one_gpu = config.devices == 1 and config.accelerator in ("auto", "gpu") and torch.cuda.is_available()
    return one_gpu and config.strategy == "auto" and not config.deterministic


def start(model: nn.Module, **options: Any) -> None:
    """Let `model.compile(**options)` compile at the first step.

    torch keeps a bounded number of graphs for each function, whoever's they are, and beyond it goes on eagerly: what
    earlier models of this process compiled is forgotten.
    """
    torch.compiler.reset()
    model.compile(**options)


def eagerly(compiled: bool = True) -> AbstractContextManager[Any]:
    """Compiled parts run as written meanwhile: for shapes that come once, and for hooks inside of them."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def failure(error: BaseException) -> str | None:
    """What the compiler stumbled over, in one line; None where an error is not the compiler's."""
    known = sys.modules.get("torch._dynamo.exc")  # not imported: then nothing was compiled
    if known is None or not isinstance(error, known.TorchDynamoException):
        return None
    inner = getattr(error, "inner_exception", error)
    return (str(inner).strip().splitlines() or [type(inner).__name__])[0]
