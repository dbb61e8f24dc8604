"""Several processes, one run. Lightning starts the command again for every further device, or a launcher (torchrun,
SLURM) has started them all.

The processes form a mesh: along "data" each takes its share of every batch, along "context" its stretch of every
sequence. A loss is that of the whole sequences, so the mean over all processes is the gradient, whatever the mesh.

SIGTERM, a scheduler's way to say that the machine is needed: save where the training stands, then leave with 143.

The signal only leaves a note. Processes agree on it between two batches, because a checkpoint needs all of them: a
process that stopped alone would leave the others waiting in a reduction.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from primal_attention.utils.errors import RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from primal_attention.parallel import Context
    from primal_attention.train.config import TrainerConfig


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


def launched() -> bool:
    """Whether a launcher started all processes at once, torchrun or a scheduler's."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def restarted() -> bool:
    """Whether this run was started before, by the same launcher or job, and has to go on by itself."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def rejoin(device: torch.device) -> None:
    """After a restart by torchrun, meet the other processes under this attempt's own keys.

    torchrun's store outlives the processes: what the dead ones wrote into it would send the new ones to addresses where
    nobody is left. A first start needs nothing; who calls init_process_group finds that it is done.
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


def agree_on_folder(folder: Path, *, named: bool = True) -> Path:
    """The main process's run folder: the others find its files there and must not take the next free number.

    named: the user has said which folder. Processes that start at once would each look for a free one.
    """
    if named:  # by the same flag for all of them
        return folder
    if launched():
        raise RunError("several processes start at once and each would pick a folder: name it with --out FOLDER")
    if is_main():
        os.environ[FOLDER] = str(folder)
        return folder
    return Path(os.environ.get(FOLDER, folder))


def machines(config: TrainerConfig) -> tuple[int, int]:
    """Devices per machine, and machines."""
    if not launched():
        return config.devices, 1
    if "TORCHELASTIC_RUN_ID" in os.environ:
        total, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        total = int(os.environ["SLURM_STEP_NUM_TASKS"])
        here = total // int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    if total != config.devices:
        raise RunError(
            f"the launcher started {total} processes and trainer.devices is {config.devices}: "
            f"add --trainer.devices {total}"
        )
    return here, total // here


@dataclass(frozen=True)
class Layout:
    """The processes of a run as a mesh of ("data", "context"), and where this one stands."""

    mesh: DeviceMesh
    everyone: Context

    @classmethod
    def of(cls, device_type: str, world: int, context: int) -> Layout:
        from torch.distributed import group
        from torch.distributed.device_mesh import init_device_mesh

        from primal_attention.parallel import Context

        mesh = init_device_mesh(device_type, (world // context, context), mesh_dim_names=("data", "context"))
        assert group.WORLD is not None
        return cls(mesh, Context(group.WORLD))

    @property
    def sequence(self) -> DeviceMesh:
        """The processes that share this one's sequences."""
        return self.mesh["context"]

    @property
    def splits(self) -> bool:
        return self.sequence.size() > 1

    @property
    def data(self) -> tuple[int, int]:
        """Which share of a batch is this process's, of how many."""
        return self.mesh.get_local_rank("data"), self.mesh["data"].size()

    def adapt(self, model: nn.Module) -> None:
        """Let a model work on its part of the sequences, with the statistics of the whole batch where it has any."""
        from primal_attention.models.uea import MaskedBatchNorm
        from primal_attention.parallel import context_parallel

        if self.splits:
            try:
                context_parallel(model, self.sequence)
            except ValueError as error:
                raise RunError(f"trainer.context {self.sequence.size()}: {error}") from error
        for module in model.modules():
            if isinstance(module, MaskedBatchNorm):
                module.context = self.everyone


def shard(model: nn.Module, mesh: Any) -> None:
    """Spread a model's weights over the devices (FSDP2): block by block, then the rest."""
    from torch.distributed.fsdp import fully_shard

    from primal_attention.nn.blocks import EncoderBlock

    for block in model.modules():
        if isinstance(block, EncoderBlock):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict with sharded tensors gathered; every process must call it."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


CODE = 128 + signal.SIGTERM  # 143, as a shell reports it


class Notice:
    """Whether the processes of this run were asked to stop."""

    def __init__(self) -> None:
        self.here = False
        self._before: Any = None

    def listen(self) -> None:
        """From now on a SIGTERM is a note. Signals reach the main thread alone: elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def rest(self) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.here = True

    def anywhere(self, device: torch.device) -> bool:
        """Whether any process has the note; all of them must ask at the same moment."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return self.here
        note = torch.tensor([float(self.here)], device=device)
        distributed.all_reduce(note, op=distributed.ReduceOp.MAX)
        return bool(note.item())


@contextlib.contextmanager
def leave_at_once() -> Iterator[None]:
    """Outside of a training there is nothing to save that is not saved: a SIGTERM ends the command with 143."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(CODE)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
