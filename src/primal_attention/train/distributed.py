"""Several processes, one run. Fabric starts the command again for every further device, or a launcher (torchrun,
SLURM) has started all processes.

The processes form a mesh: along "data" each takes its share of every batch, along "context" its shard of every
sequence. A loss is that of complete sequences, so the mean over all processes is the gradient for any mesh.

SIGTERM, by which a scheduler asks for the machine, sets a flag. The processes agree on it between two batches, because
a checkpoint needs all of them. The run saves a checkpoint and exits with code 143.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from primal_attention.data.storage import one_line
from primal_attention.nn.blocks import EncoderBlock
from primal_attention.train.config import TrainerConfig, require
from primal_attention.utils.errors import RunError

EXIT_CODE = 128 + signal.SIGTERM  # 143, as shells report it


def rank() -> int:
    """Return this process's rank; 0 if it is the only process."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def is_main() -> bool:
    """Return True in the process that writes the run's files and prints."""
    return rank() == 0


def launched() -> bool:
    """Return True if a launcher started all processes at once, torchrun or a scheduler's."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def restarted() -> bool:
    """Return True if the launcher or the job was started before: the run then resumes without --resume."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def rejoin(device: torch.device) -> None:
    """After a restart by torchrun, initialize the process group under keys of this attempt.

    torchrun's store outlives the processes, and the keys of the dead ones would point to addresses that are gone.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    world = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank(), world_size=world)


def machines(config: TrainerConfig) -> tuple[int, int]:
    """Return the devices per machine and the number of machines."""
    total = here = config.devices
    if "TORCHELASTIC_RUN_ID" in os.environ:
        total, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    elif launched():
        total = int(os.environ["SLURM_STEP_NUM_TASKS"])
        here = total // int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    started = f"the launcher started {total} processes and trainer.devices is {config.devices}"
    require(total == config.devices, f"{started}: add --trainer.devices {total}")
    return here, total // here


def make_fabric(config: TrainerConfig) -> Any:
    """Return Fabric for the devices and the precision of a recipe, without its notices.

    FSDP runs use the DDP strategy for its processes and shard the model themselves.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    devices, nodes = machines(config)
    has_strategy = config.devices == 1 or config.strategy != "auto"
    require(has_strategy, f"trainer.devices {config.devices} needs --trainer.strategy ddp or fsdp")
    strategy = "auto" if config.strategy == "auto" else "ddp"
    options: dict[str, Any] = {"accelerator": config.accelerator, "devices": devices, "num_nodes": nodes}
    try:
        return Fabric(strategy=strategy, precision=config.precision, **options)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise RunError(one_line(error)) from error


def pick_device(config: TrainerConfig) -> torch.device:
    """Return the device of a single-process evaluation."""
    if config.accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if config.accelerator != "cpu" and torch.backends.mps.is_available() else "cpu")


def shard(model: nn.Module, device_type: str) -> None:
    """Shard a model's weights over all processes (FSDP2): block by block, then the rest."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for block in [*(module for module in model.modules() if isinstance(module, EncoderBlock)), model]:
        fully_shard(block, mesh=mesh)


def gather_full(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a state dict with sharded tensors gathered; every process must call it."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def split_like(target: Any, full: Tensor) -> Tensor:
    """Return an unsharded tensor as `target` holds it: this process's rows if sharded. All processes must call it."""
    if not hasattr(target, "device_mesh"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(target.device), target.device_mesh, target.placements)


def load_full(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load unsharded tensors into a model that may be sharded; all processes must call it."""
    own = model.state_dict()
    model.load_state_dict({name: split_like(own[name], tensor) for name, tensor in state.items()})


@contextlib.contextmanager
def handle_signal(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Handle a signal in this context. Only the main thread receives signals; in others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def leave_at_once() -> AbstractContextManager[None]:
    """End the command with code 143 on SIGTERM outside of a training, where everything is saved."""
    return handle_signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODE))
