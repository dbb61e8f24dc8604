"""Several processes, one run: Lightning starts the command again for every further device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

FOLDER = "PRIMAL_RUN_FOLDER"


def rank() -> int:
    """This process's number in the run; 0 also when it is the only one."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def is_main() -> bool:
    """Whether this process writes the run's files and speaks to the user."""
    return rank() == 0


def agree_on_folder(folder: Path) -> Path:
    """The main process's run folder: the others find its files there and must not take the next free number."""
    if is_main():
        os.environ[FOLDER] = str(folder)
        return folder
    return Path(os.environ.get(FOLDER, folder))


def shard(model: nn.Module, mesh: Any) -> None:
    """Spread a model's weights over the devices (FSDP2): block by block, then the rest."""
    from torch.distributed.fsdp import fully_shard

    from primal_attention.nn.encoder import EncoderBlock

    for block in model.modules():
        if isinstance(block, EncoderBlock):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict with sharded tensors gathered; every process must call it."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
